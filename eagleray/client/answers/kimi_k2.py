"""Tool calls of Kimi K2: ids, which have the names in them, and JSON between special tokens, in a section of calls."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eagleray.client.answers.call_sections import CallHeader, SectionMarkers, SectionSplitter, constrain_section
from eagleray.client.answers.constraints import arguments_of, constant, constrained_tools, pattern, sequence, tag
from eagleray.client.answers.formats import StructuralFormat, ToolFormat
from eagleray.client.answers.parts import Splitter
from eagleray.client.answers.tools import Tool, ToolChoice

MARKERS = SectionMarkers(
    section_begin="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    call_begin="<|tool_call_begin|>",
    header_end="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
)
_ID = re.compile(r"(?:functions\.)?(?P<name>.*?)(?P<number>:\d+)?", re.DOTALL)


class KimiK2Format(ToolFormat):
    """Calls as `<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{…}<|tool_call_end|>`."""

    name = "kimi_k2"
    markers = tuple(filter(None, MARKERS))

    def splitter(self, tools: Sequence[Tool]) -> Splitter:
        return _KimiK2Splitter(MARKERS)

    def constraint(self, tools: Sequence[Tool], choice: ToolChoice) -> StructuralFormat | None:
        return constrain_section([_tag(tool) for tool in constrained_tools(tools, choice)], choice, MARKERS)


class _KimiK2Splitter(SectionSplitter):
    def read_header(self, text: str) -> CallHeader:
        call_id = text.strip()
        found = _ID.fullmatch(call_id)
        assert found is not None  # any text matches
        return CallHeader(found["name"], call_id if found["number"] else None)


def _tag(tool: Tool) -> StructuralFormat:
    arguments = sequence(pattern("[0-9]+"), constant(MARKERS.header_end), arguments_of(tool))
    return tag(f"{MARKERS.call_begin}functions.{tool.name}:", arguments, MARKERS.call_end)
