"""The tools of a request, as they are read and chosen."""

from __future__ import annotations

from collections.abc import Iterator

from eagleray.client.answers.requested_tools import CHAT_TOOLS, OfferedTools, choose_tools, read_tools
from eagleray.client.answers.tools import Tool


class CountedTools(tuple[Tool, ...]):
    """Tools that count how often they are looked through."""

    num_iterations = 0

    def __iter__(self) -> Iterator[Tool]:
        self.num_iterations += 1
        return super().__iter__()


def test_choose_tools_many_allowed_tools_are_checked_in_one_pass() -> None:
    tools = CountedTools(Tool(name=f"f{index}") for index in range(50))
    allowed = [{"type": "function", "name": tool.name} for tool in tools[10:]]
    tools.num_iterations = 0
    offered = OfferedTools(tools, tuple({"name": tool.name} for tool in tuple.__iter__(tools)))
    chosen = choose_tools(offered, {"type": "allowed_tools", "mode": "auto", "tools": allowed})
    assert [tool.name for tool in chosen.offered.tools] == [entry["name"] for entry in allowed]
    assert tools.num_iterations < 5


def test_read_tools_without_a_schema_have_no_arguments() -> None:
    (tool,) = read_tools([{"type": "function", "function": {"name": "now"}}], CHAT_TOOLS).tools
    assert tool.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
