"""Tool calls of Mistral's models: a marker, and a list of JSON objects or, in newer models, a name and arguments."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence

from eagleray.client.answers.call_splitter import CALL_NAME, CallEnd, CallSplitter
from eagleray.client.answers.constraints import (
    arguments_of,
    calls_in_text,
    calls_only,
    constrained_tools,
    one_of,
    tag,
)
from eagleray.client.answers.formats import StructuralFormat, ToolFormat
from eagleray.client.answers.marker_search import MarkerSearch
from eagleray.client.answers.parts import Splitter
from eagleray.client.answers.text_reader import WHITE_SPACE, Reading, json_ends
from eagleray.client.answers.tools import Tool, ToolChoice

TOOL_CALLS = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"


class MistralFormat(ToolFormat):
    """Calls as `[TOOL_CALLS] [{"name": …, "arguments": {…}}]` or as `[TOOL_CALLS]name[ARGS]{…}`."""

    name = "mistral"
    markers = (TOOL_CALLS, CALL_ID, ARGS)

    def fits_template(self, template: str) -> bool:
        """Whether the template has the marker of both kinds of calls."""
        return TOOL_CALLS in template

    def splitter(self, tools: Sequence[Tool]) -> Splitter:
        return _MistralSplitter()

    def constraint(self, tools: Sequence[Tool], choice: ToolChoice) -> StructuralFormat | None:
        allowed = constrained_tools(tools, choice)
        if not allowed:
            return None
        objects = calls_only([_object_tag(tool) for tool in allowed], choice, separator=", ")
        lists = [tag(f"{TOOL_CALLS}{space}[", objects, "]") for space in (" ", "")]
        calls = [tag(f"{TOOL_CALLS}{tool.name}{ARGS}", arguments_of(tool), "") for tool in allowed]
        if choice.mode == "required":
            return one_of(calls_only(calls, choice), *lists)
        return calls_in_text([*calls, *lists], choice, TOOL_CALLS)

    def make_call_id(self) -> str:
        """Return nine letters and digits: templates refuse other ids."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class _MistralSplitter(CallSplitter):
    _START = MarkerSearch(TOOL_CALLS)
    _NAME_ENDS = MarkerSearch(TOOL_CALLS, CALL_ID, ARGS, "{", *WHITE_SPACE)
    _JSON_ENDS = json_ends(TOOL_CALLS)

    def read(self) -> Reading[None]:
        while (yield from self.text.read_until(self._START, self.parts.content)) is not None:
            self.text.start_record(TOOL_CALLS)
            yield from self.text.read_space()
            while (marker := (yield from self.text.take("[", TOOL_CALLS))) == TOOL_CALLS:
                yield from self.text.read_space()
            if marker or (yield from self.text.peek()) == "{":
                is_call = yield from self._read_objects()
            else:
                is_call = yield from self._read_named_call()
            if not is_call:
                self.parts.content(self.text.stop_record())

    def _read_objects(self) -> Reading[bool]:
        """Read calls that are objects, up to the end of their list. Returns whether the last one was a call."""
        while True:
            yield from self.text.read_space()
            end = yield from self.read_call_object(self._JSON_ENDS)
            if end is CallEnd.COMPLETE:
                self.parts.separator((yield from self.text.read_space()))
                if (yield from self.text.take(",", "]")) == ",":
                    self.parts.separator(",")
                    self.text.start_record()
                    continue
            return end is not CallEnd.NO_CALL

    def _read_named_call(self) -> Reading[bool]:
        """Read a call that begins with its name. Returns whether it is one."""
        pieces: list[str] = []
        yield from self.text.read_before(self._NAME_ENDS, pieces.append)
        name = "".join(pieces)
        yield from self.text.read_space()
        call_id: str | None = None
        is_call = (yield from self.text.peek()) == "{"
        if name and (marker := (yield from self.text.take(CALL_ID, ARGS))) is not None:
            is_call = True
            if marker == CALL_ID:
                call_id = yield from self._read_id()
        if not is_call or not CALL_NAME.fullmatch(name):
            return False
        self.begin_call(name, call_id)
        yield from self.text.read_space()
        if (yield from self.text.peek()) == "{":
            yield from self.text.read_json(self.parts.arguments, self._JSON_ENDS)
        else:
            yield from self.text.read_before(self._START, self.parts.arguments)
        return True

    def _read_id(self) -> Reading[str | None]:
        """Read an id up to the arguments; None if it is cut off."""
        pieces: list[str] = []
        end = yield from self.text.read_before(self._NAME_ENDS, pieces.append)
        yield from self.text.read_space()
        yield from self.text.take(ARGS)
        return "".join(pieces) if end is not None else None


def _object_tag(tool: Tool) -> StructuralFormat:
    return tag(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ', arguments_of(tool), "}")
