"""Tool calls of Qwen3-Coder: parameters as plain text between tags."""

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
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderFormat(ToolFormat):
    """Calls as `<tool_call>`, `<function=name>`, and `<parameter=name>value</parameter>` for each argument."""

    name = "qwen3_coder"
    markers = (CALL, CALL_END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)

    def splitter(self, tools: Sequence[Tool]) -> Splitter:
        return _Qwen3CoderSplitter(tools)

    def constraint(self, tools: Sequence[Tool], choice: ToolChoice) -> StructuralFormat | None:
        return constrain_calls(tools, choice, _tag, CALL, separator="\n")


class _Qwen3CoderSplitter(CallSplitter):
    _STARTS = MarkerSearch(CALL, FUNCTION)
    _NAME_ENDS = MarkerSearch(">", "<", "\n")
    _PARAMETERS = MarkerSearch(PARAMETER, FUNCTION_END, CALL_END)
    _VALUE_ENDS = MarkerSearch(PARAMETER_END, *(f"\n{end}" for end in (PARAMETER_END, PARAMETER, FUNCTION_END)))

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._types = ParameterTypes(tools)

    def read(self) -> Reading[None]:
        while (start := (yield from self.text.read_until(self._STARTS, self.parts.content))) is not None:
            self.text.start_record(start)
            if start == CALL:
                yield from self.text.read_space()
                start = yield from self.text.take(FUNCTION)
            name = (yield from self._read_name()) if start == FUNCTION else ""
            if not CALL_NAME.fullmatch(name):
                self.parts.content(self.text.stop_record())
                continue
            self.begin_call(name)
            if (yield from self._read_parameters(TypedArguments(self.parts, self._types, name))) == FUNCTION_END:
                space = yield from self.text.read_space()
                if not (yield from self.text.take_end(CALL_END)):
                    self.parts.separator(space)

    def _read_name(self) -> Reading[str]:
        """Read a name with the bracket after it; "" if no bracket comes."""
        pieces: list[str] = []
        yield from self.text.read_before(self._NAME_ENDS, pieces.append)
        return "".join(pieces) if (yield from self.text.take(">")) else ""

    def _read_parameters(self, arguments: TypedArguments) -> Reading[str | None]:
        """Read the parameters of a call, and the marker after them, which is returned; None if the text ends."""
        marker = yield from self.text.read_until(self._PARAMETERS, discard)
        while marker == PARAMETER:
            name = yield from self._read_name()
            marker = PARAMETER_END
            if name:
                yield from self.text.take("\n")
                arguments.begin_parameter(name)
                marker = yield from self._read_value(arguments)
                arguments.end_parameter(is_complete=marker is not None)
            if marker == PARAMETER_END:
                marker = yield from self.text.read_until(self._PARAMETERS, discard)
        if marker is not None:
            arguments.end()
        return marker

    def _read_value(self, arguments: TypedArguments) -> Reading[str | None]:
        """Read a value, and the marker after it, which is returned; None if the text ends.

        Models forget the value's own end. The end of the function is one too, but only at the end of the call: it may
        also be a line of the value.
        """
        while (end := (yield from self.text.read_until(self._VALUE_ENDS, arguments.value))) is not None:
            marker = end.removeprefix("\n")
            if marker != FUNCTION_END:
                return marker
            space = yield from self.text.read_space()
            after = yield from self.text.take(CALL_END, PARAMETER_END)
            if after == CALL_END or not (after or (yield from self.text.peek())):
                return CALL_END
            arguments.value(end + (space.removesuffix("\n") if after else space))
            if after:
                return after
        return None


def _tag(tool: Tool) -> StructuralFormat:
    begin, end = f"{CALL}\n{FUNCTION}{tool.name}>\n", f"\n{FUNCTION_END}\n{CALL_END}"
    return tag(begin, arguments_of(tool, style="qwen_xml"), end)
