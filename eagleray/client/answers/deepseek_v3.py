"""Tool calls of DeepSeek V3 and R1: names and blocks of JSON between special tokens, in a section of calls."""

from __future__ import annotations

from collections.abc import Sequence

from eagleray.client.answers.call_sections import CallHeader, SectionMarkers, SectionSplitter, constrain_section
from eagleray.client.answers.constraints import arguments_of, constrained_tools, tag
from eagleray.client.answers.formats import StructuralFormat, ToolFormat
from eagleray.client.answers.parts import Splitter
from eagleray.client.answers.tools import Tool, ToolChoice

SEPARATOR = "<｜tool▁sep｜>"
MARKERS = SectionMarkers(
    section_begin="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    call_begin="<｜tool▁call▁begin｜>",
    header_end="\n",
    call_end="<｜tool▁call▁end｜>",
    fence_begin="```json",
    fence_end="```",
)


class DeepSeekV3Format(ToolFormat):
    """Calls as `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a block of JSON, and `<｜tool▁call▁end｜>`."""

    name = "deepseek_v3"
    markers = (MARKERS.section_begin, MARKERS.section_end, MARKERS.call_begin, MARKERS.call_end, SEPARATOR)

    def fits_template(self, template: str) -> bool:
        return super().fits_template(template) and MARKERS.fence_begin in template

    def splitter(self, tools: Sequence[Tool]) -> Splitter:
        return _DeepSeekV3Splitter(MARKERS)

    def constraint(self, tools: Sequence[Tool], choice: ToolChoice) -> StructuralFormat | None:
        calls = [_tag(tool) for tool in constrained_tools(tools, choice)]
        return constrain_section(calls, choice, MARKERS, separator="\n")


class _DeepSeekV3Splitter(SectionSplitter):
    def read_header(self, text: str) -> CallHeader:
        _, _, name = text.partition(SEPARATOR)  # before the separator stands the type, which is function
        return CallHeader(name.strip())


def _tag(tool: Tool) -> StructuralFormat:
    begin = f"{MARKERS.call_begin}function{SEPARATOR}{tool.name}\n{MARKERS.fence_begin}\n"
    return tag(begin, arguments_of(tool), f"\n{MARKERS.fence_end}{MARKERS.call_end}")
