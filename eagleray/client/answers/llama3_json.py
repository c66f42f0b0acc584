"""Tool calls of Llama 3.1 to 4: JSON objects, with nothing around them that tells calls from other JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from eagleray.client.answers.call_splitter import CallEnd, CallSplitter
from eagleray.client.answers.constraints import arguments_of, constrain_calls, tag
from eagleray.client.answers.formats import StructuralFormat, ToolFormat
from eagleray.client.answers.marker_search import MarkerSearch
from eagleray.client.answers.parts import Splitter
from eagleray.client.answers.text_reader import Reading
from eagleray.client.answers.tools import Tool, ToolChoice

PYTHON_TAG = "<|python_tag|>"
_HEADERS = ("<|start_header_id|>", "<|header_start|>")


class Llama3JsonFormat(ToolFormat):
    """Calls as `{"name": …, "parameters": {…}}`, several separated by `;`.

    An object that doesn't follow the tag <|python_tag|> is a call only if its name is a tool's.
    """

    name = "llama3_json"
    markers = (PYTHON_TAG,)

    def fits_template(self, template: str) -> bool:
        """Whether the template is a Llama's and shows calls as JSON."""
        shows_calls = '{"name":' in template and '"parameters":' in template
        return shows_calls and any(header in template for header in _HEADERS)

    def splitter(self, tools: Sequence[Tool]) -> Splitter:
        return _Llama3JsonSplitter(tools)

    def constraint(self, tools: Sequence[Tool], choice: ToolChoice) -> StructuralFormat | None:
        return constrain_calls(tools, choice, _tag, trigger='{"name": "', separator="; ")


class _Llama3JsonSplitter(CallSplitter):
    _STARTS = MarkerSearch(PYTHON_TAG, "{", "[")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._names = {tool.name for tool in tools}

    def read(self) -> Reading[None]:
        while (yield from self.text.read_before(self._STARTS, self.parts.content)) is not None:
            self.text.start_record()
            is_tagged = (yield from self.text.take(PYTHON_TAG)) is not None
            yield from self.text.read_space()
            yield from self.text.take("[")  # some models write a list
            yield from self.text.read_space()
            end = yield from self.read_call_object(names=None if is_tagged else self._names)
            if end is CallEnd.NO_CALL:
                self.parts.content(self.text.stop_record())
            elif end is CallEnd.COMPLETE:
                self.parts.separator((yield from self.text.read_space()))
                self.parts.separator((yield from self.text.take(";", ",", "]")) or "")


def _tag(tool: Tool) -> StructuralFormat:
    return tag(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "parameters": ', arguments_of(tool), "}")
