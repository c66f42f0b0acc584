"""Tool calls of GLM-4.5 and later models of its family: keys and values as plain text between tags."""

from __future__ import annotations

from collections.abc import Sequence

from eagleray.client.answers.call_splitter import CALL_NAME, CallSplitter
from eagleray.client.answers.constraints import arguments_of, constrain_calls, tag
from eagleray.client.answers.formats import StructuralFormat, ToolFormat
from eagleray.client.answers.marker_search import MarkerSearch
from eagleray.client.answers.parts import Splitter
from eagleray.client.answers.text_reader import Reading, discard
from eagleray.client.answers.tools import Tool, ToolChoice
from eagleray.client.answers.typed_arguments import ParameterTypes, TypedArguments

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class Glm45Format(ToolFormat):
    """Calls as `<tool_call>NAME`, and `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` for each argument.

    In GLM-4.5's calls each of them has a line of its own, in GLM-4.7's nothing stands between them.
    """

    name = "glm45"
    markers = (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)

    def splitter(self, tools: Sequence[Tool]) -> Splitter:
        return _Glm45Splitter(tools)

    def constraint(self, tools: Sequence[Tool], choice: ToolChoice) -> StructuralFormat | None:
        return constrain_calls(tools, choice, _tag, CALL, separator="\n")


class _Glm45Splitter(CallSplitter):
    _CALL = MarkerSearch(CALL)
    _NAME_ENDS = MarkerSearch("\n", KEY, CALL_END, *' "<{')  # the latter stand in no name
    _KEY_OR_END = MarkerSearch(KEY, CALL_END)
    _KEY_END = MarkerSearch(KEY_END, KEY, CALL_END)
    _VALUE_END = MarkerSearch(VALUE_END)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._types = ParameterTypes(tools)

    def read(self) -> Reading[None]:
        while (yield from self.text.read_until(self._CALL, self.parts.content)) is not None:
            self.text.start_record(CALL)
            yield from self.text.read_space()
            pieces: list[str] = []
            end = yield from self.text.read_before(self._NAME_ENDS, pieces.append)
            name = "".join(pieces).strip()
            if end not in ("\n", KEY, CALL_END) or not CALL_NAME.fullmatch(name):
                self.parts.content(self.text.stop_record())
                continue
            self.begin_call(name)
            yield from self._read_parameters(TypedArguments(self.parts, self._types, name))

    def _read_parameters(self, arguments: TypedArguments) -> Reading[None]:
        """Read keys and values up to the end of the call. A key without a value, and other text, is left out."""
        while (marker := (yield from self.text.read_until(self._KEY_OR_END, discard))) == KEY:
            key: list[str] = []
            yield from self.text.read_before(self._KEY_END, key.append)
            has_key = yield from self.text.take(KEY_END)
            yield from self.text.read_space()
            if not has_key or not (yield from self.text.take(VALUE)):
                continue
            arguments.begin_parameter("".join(key).strip())
            end = yield from self.text.read_until(self._VALUE_END, arguments.value)
            arguments.end_parameter(is_complete=end is not None)
        if marker == CALL_END:
            arguments.end()


def _tag(tool: Tool) -> StructuralFormat:
    return tag(CALL + tool.name, arguments_of(tool, "glm_xml"), [CALL_END, f"\n{CALL_END}"])
