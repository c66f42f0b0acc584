"""Tool calls of Hermes, Qwen2.5 and Qwen3: a JSON object between tags."""

from __future__ import annotations

import json
from collections.abc import Sequence

from eagleray.client.answers.call_splitter import CallEnd, CallSplitter
from eagleray.client.answers.constraints import arguments_of, constrain_calls, tag
from eagleray.client.answers.formats import StructuralFormat, ToolFormat
from eagleray.client.answers.marker_search import MarkerSearch
from eagleray.client.answers.parts import Splitter
from eagleray.client.answers.text_reader import Reading, json_ends
from eagleray.client.answers.tools import Tool, ToolChoice

START = "<tool_call>"
END = "</tool_call>"
LIST_START = "<tool_calls>["


class HermesFormat(ToolFormat):
    """Calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    name = "hermes"
    markers = (START, END)

    def fits_template(self, template: str) -> bool:
        """Whether a chat template shows calls in this format. The templates of Apriel-1.5 have the markers in a
        sentence, but their models write all calls as one list in another tag."""
        return super().fits_template(template) and LIST_START not in template

    def splitter(self, tools: Sequence[Tool]) -> Splitter:
        return _HermesSplitter()

    def constraint(self, tools: Sequence[Tool], choice: ToolChoice) -> StructuralFormat | None:
        return constrain_calls(tools, choice, _tag, START, separator="\n")


class _HermesSplitter(CallSplitter):
    _START = MarkerSearch(START)
    _END = MarkerSearch(END)
    _JSON_ENDS = json_ends(END)

    def read(self) -> Reading[None]:
        while (yield from self.text.read_until(self._START, self.parts.content)) is not None:
            self.text.start_record(START)
            yield from self.text.read_space()
            end = yield from self.read_call_object(self._JSON_ENDS)
            if end is CallEnd.NO_CALL:
                self.parts.content(self.text.stop_record())
            elif end is CallEnd.BROKEN:
                yield from self.read_broken(self._END)
            else:
                space = yield from self.text.read_space()
                if not (yield from self.text.take_end(END, "}" + END)):  # some models close one bracket too many
                    self.parts.separator(space)


def _tag(tool: Tool) -> StructuralFormat:
    begin = f'{START}\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
    return tag(begin, arguments_of(tool), "}\n" + END)
