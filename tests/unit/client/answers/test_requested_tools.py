"""The tools of a request, as they are read and chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from eagleray.client.answers.requested_tools import (
    ANTHROPIC_TOOLS,
    CHAT_TOOLS,
    RESPONSES_TOOLS,
    OfferedTools,
    ToolForm,
    choose_tools,
    read_tools,
)
from eagleray.client.answers.tools import Tool
from eagleray.errors import InvalidRequest

CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}


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


@pytest.mark.parametrize(
    ("form", "tools", "param"),
    [
        (CHAT_TOOLS, [RESPONSES_TOOL], "tools[0].function"),
        (CHAT_TOOLS, [CHAT_TOOL, ANTHROPIC_TOOL], "tools[1].function"),
        (RESPONSES_TOOLS, [CHAT_TOOL], "tools[0].name"),
        (RESPONSES_TOOLS, [ANTHROPIC_TOOL], "tools[0].type"),
        (ANTHROPIC_TOOLS, [RESPONSES_TOOL], "tools[0].type"),
    ],
)
def test_read_tools_in_the_form_of_another_api_shows_the_form(form: ToolForm, tools: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_tools(tools, form)
    assert refused.value.param == param
    assert form.example in str(refused.value)


def test_read_tools_that_are_no_list_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="`tools` must be a list, but it is"):
        read_tools(CHAT_TOOL, CHAT_TOOLS)  # type: ignore[arg-type]


def test_choose_tools_name_that_is_not_offered_is_refused_with_the_names_there_are() -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    with pytest.raises(InvalidRequest, match="'g', which is none of the `tools`: f"):
        choose_tools(read_tools([CHAT_TOOL], CHAT_TOOLS), choice)
    with pytest.raises(InvalidRequest, match="'g', but the request has no `tools`"):
        choose_tools(OfferedTools(), choice)
