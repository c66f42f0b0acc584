"""Tool calls of DeepSeek V3.1: names and JSON between special tokens, in a section of calls."""

from __future__ import annotations

from collections.abc import Sequence

from eagleray.client.answers.call_sections import CallHeader, SectionMarkers, SectionSplitter, constrain_section
from eagleray.client.answers.constraints import arguments_of, constrained_tools, tag
from eagleray.client.answers.formats import StructuralFormat, ToolFormat
from eagleray.client.answers.parts import Splitter
from eagleray.client.answers.tools import Tool, ToolChoice

MARKERS = SectionMarkers(
    section_begin="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    call_begin="<｜tool▁call▁begin｜>",
    header_end="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
)


class DeepSeekV31Format(ToolFormat):
    """Calls as `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`."""

    name = "deepseek_v31"
    markers = tuple(filter(None, MARKERS))

    def fits_template(self, template: str) -> bool:
        return super().fits_template(template) and "```json" not in template  # which DeepSeek V3's has

    def splitter(self, tools: Sequence[Tool]) -> Splitter:
        return _DeepSeekV31Splitter(MARKERS)

    def constraint(self, tools: Sequence[Tool], choice: ToolChoice) -> StructuralFormat | None:
        return constrain_section([_tag(tool) for tool in constrained_tools(tools, choice)], choice, MARKERS)


class _DeepSeekV31Splitter(SectionSplitter):
    def read_header(self, text: str) -> CallHeader:
        return CallHeader(text.strip())


def _tag(tool: Tool) -> StructuralFormat:
    begin = f"{MARKERS.call_begin}{tool.name}{MARKERS.header_end}"
    return tag(begin, arguments_of(tool), MARKERS.call_end)
