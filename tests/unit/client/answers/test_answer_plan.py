"""The plan of answers: formats without constraints, and whole answers in their parts."""

from __future__ import annotations

import json

import pytest

from eagleray.client.answers.choose import choose_formats
from eagleray.client.answers.divide import divide_answer
from eagleray.client.answers.formats import ToolFormat
from eagleray.client.answers.plan import AnswerFormats, AnswerPlan, Undivided
from eagleray.client.answers.reasoning_formats import reasoning_format
from eagleray.client.answers.requested_tools import CHAT_TOOLS, choose_tools, read_tools
from eagleray.client.answers.tool_formats import get_tool_format
from eagleray.config.sections import ModelConfig
from eagleray.errors import UnsupportedParameter
from eagleray.messages.structured_outputs import StructuredOutputsParams


class Unconstrained(ToolFormat):
    name = "unconstrained"
    markers = ("<call>",)

    def splitter(self, tools):
        return Undivided()


def plan_of(formats, *, choice=None, is_parallel=None, **function):
    tools = read_tools([{"function": {"name": "f", **function}}], CHAT_TOOLS)
    return formats.plan(choose_tools(tools, choice, is_parallel=is_parallel))


@pytest.mark.parametrize(
    ("request_fields", "content", "param"),
    [
        ({"choice": "required"}, None, "tool_choice"),
        ({"strict": True}, None, "tools"),
        ({"is_parallel": False}, None, "parallel_tool_calls"),
        ({}, StructuredOutputsParams(regex="a"), "structured_outputs"),
    ],
)
def test_plan_with_a_format_without_constraints_refuses_what_needs_them(request_fields, content, param):
    with pytest.raises(UnsupportedParameter, match="unconstrained of tool calls has no constraints") as refused:
        plan_of(AnswerFormats(Unconstrained()), **request_fields).constrain(content)
    assert refused.value.param == param


def test_plan_with_a_format_without_constraints_leaves_free_calls():
    assert plan_of(AnswerFormats(Unconstrained())).constrain(None) is None
    assert plan_of(AnswerFormats(Unconstrained()), choice="none").tools is None


@pytest.mark.parametrize("is_closed", [False, True])
def test_plan_content_beside_tools_follows_the_option_for_additional_properties(is_closed):
    options = ModelConfig(tool_call_parser="hermes", structured_outputs_disable_additional_properties=is_closed)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    constraint = plan_of(choose_formats(options, "")).constrain(StructuredOutputsParams(json=schema))
    _, content = json.loads(constraint.structural_tag)["format"]["elements"]
    assert content["json_schema"] == schema | ({"additionalProperties": False} if is_closed else {})


def test_plan_without_a_format_refuses_tools():
    with pytest.raises(UnsupportedParameter, match="--tool-call-parser"):
        plan_of(AnswerFormats())
    assert not plan_of(AnswerFormats(), choice="none").is_divided


@pytest.mark.parametrize(
    ("answer", "reasoning", "content", "arguments"),
    [
        ("hello", None, "hello", []),
        ("", None, "", []),
        ("<think>well</think>hello", "well", "hello", []),
        ("<think>well", "well", None, []),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', None, None, ["{}"]),
        ('<tool_call>{"name": "f", "arguments": {"a"', None, None, ['{"a"']),
    ],
)
def test_divide_answer_returns_its_parts(answer, reasoning, content, arguments):
    plan = plan_of(AnswerFormats(get_tool_format("hermes"), reasoning_format("qwen3")))
    parts = divide_answer(plan, "<|im_start|>assistant\n", answer)
    assert (parts.reasoning, parts.content) == (reasoning, content)
    assert [(call.name, call.arguments) for call in parts.tool_calls] == [("f", text) for text in arguments]
    assert all(call.id for call in parts.tool_calls)
    assert divide_answer(AnswerPlan(), "", answer) == (None, answer, [])
