"""The constraints of formats of tool calls, as the grammars that they become."""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import pytest
from grammar_tokenizers import WHITESPACE, Words

from eagleray.client.answers.formats import StructuralFormat, ToolFormat
from eagleray.client.answers.tool_formats import get_tool_format
from eagleray.client.answers.tools import Tool, ToolChoice
from eagleray.errors import InvalidRequest
from eagleray.messages.grammars import PARAM, Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    Tool(name="f", parameters=SCHEMA | {"additionalProperties": False}, strict=True),
    Tool(name="f_g", parameters={"type": "object"}),
]
AUTO, REQUIRED = ToolChoice("auto"), ToolChoice("required")
GOOD, BAD, OTHER = '{"a": "x", "b": 2}', '{"b": 2}', '{"c": [1]}'


class Written(NamedTuple):
    """Calls in a format: of `f` with and without its required argument, and of `f_g`, around which there are texts."""

    good: str
    bad: str
    other: str
    begin: str = ""
    separator: str = ""
    end: str = ""


def deepseek(call: str, **further: str) -> Written:
    texts = [call.format(name=name, json=text) for name, text in (("f", GOOD), ("f", BAD), ("f_g", OTHER))]
    return Written(*texts, begin="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>", **further)


def kimi(name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:12<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def glm(name: str, between: str, **arguments: str) -> str:
    pairs = [
        f"{between}<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>" for key, value in arguments.items()
    ]
    return f"<tool_call>{name}{''.join(pairs)}{between}</tool_call>"


def glm_calls(between: str) -> Written:
    calls = glm("f", between, a="x < </", b="2"), glm("f", between, b="2"), glm("f_g", between, c="[1]")
    return Written(*calls, separator="\n")


def json_calls(call: str, **further: str) -> Written:
    texts = [
        call.replace("NAME", name).replace("JSON", text) for name, text in (("f", GOOD), ("f", BAD), ("f_g", OTHER))
    ]
    return Written(*texts, **further)


def qwen(name: str, **arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


CALLS = {
    "hermes": json_calls('<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>', separator="\n"),
    "qwen3_coder": Written(qwen("f", a="x < </", b="2"), qwen("f", b="2"), qwen("f_g", c="[1]"), separator="\n"),
    "llama3_json": json_calls('{"name": "NAME", "parameters": JSON}', separator="; "),
    "mistral": json_calls("[TOOL_CALLS]NAME[ARGS]JSON"),
    "mistral (list)": json_calls(
        '{"name": "NAME", "arguments": JSON}', begin="[TOOL_CALLS] [", separator=", ", end="]"
    ),
    "deepseek_v3": deepseek(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json}\n```<｜tool▁call▁end｜>", separator="\n"
    ),
    "deepseek_v31": deepseek("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜>"),
    "kimi_k2": Written(
        kimi("f", GOOD),
        kimi("f", BAD),
        kimi("f_g", OTHER),
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    "glm45": glm_calls("\n"),
    "glm47": glm_calls(""),
}


def format_of(name: str) -> ToolFormat:
    """Return the format that a key of `CALLS` names."""
    return get_tool_format(name.split()[0])


@functools.cache
def words_of(name: str) -> Words:
    return Words.make(special=format_of(name).markers)


def allows(name: str, choice: ToolChoice, text: str) -> bool:
    """Whether the constraint of a choice among the tools allows the text."""
    constraint = format_of(name).constraint(TOOLS, choice)
    assert constraint is not None
    return matches(name, constraint, text)


def matches(name: str, constraint: StructuralFormat, text: str) -> bool:
    """Whether a constraint allows the text, as its tokens and byte by byte."""
    words = words_of(name)
    source = json.dumps({"type": "structural_tag", "format": constraint})
    compiled = words.compile(Grammar(kind="structural_tag", source=source, whitespace=WHITESPACE))
    is_accepted = words.accepted(compiled, words.encode(text, by_byte=True))
    assert words.matched(compiled, words.encode(text)) is is_accepted
    return is_accepted


@pytest.mark.parametrize("name", CALLS)
def test_required_constraint_allows_calls_that_follow_their_schemas_alone(name: str) -> None:
    good, bad, other, begin, separator, end = CALLS[name]
    assert allows(name, REQUIRED, begin + good + end)
    assert allows(name, REQUIRED, begin + good + separator + other + separator + good + end)
    assert not allows(name, REQUIRED, begin + bad + end)
    assert not allows(name, REQUIRED, "Hi")
    assert not allows(name, REQUIRED, begin + end)


@pytest.mark.parametrize("name", CALLS)
def test_constraint_of_one_call_allows_no_more(name: str) -> None:
    good, _, other, begin, separator, end = CALLS[name]
    named, single = ToolChoice("required", name="f_g"), ToolChoice("required", is_parallel=False)
    assert allows(name, named, begin + other + end)
    assert not allows(name, named, begin + good + end)
    for choice in (named, single):
        assert not allows(name, choice, begin + other + separator + other + end)
    assert allows(name, single, begin + good + end)
    assert format_of(name).constraint(TOOLS[1:], AUTO) is None
    assert format_of(name).constraint(TOOLS, ToolChoice("none")) is None


@pytest.mark.parametrize("name", CALLS)
def test_auto_constraint_is_for_strict_tools_alone(name: str) -> None:
    good, bad, other, begin, separator, end = CALLS[name]
    assert allows(name, AUTO, "Hi {}")
    assert allows(name, AUTO, "Hi\n" + begin + good + separator + other + end)
    assert not allows(name, AUTO, "Hi\n" + begin + bad + end)


THINK = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
HEADERS = [
    " to=functions.{}<|channel|>commentary json<|message|>",
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{}<|constrain|>json<|message|>",
]


@pytest.mark.parametrize("before", ["", THINK, PREAMBLE, THINK + PREAMBLE + THINK, "<|start|>assistant" + PREAMBLE])
def test_harmony_constraint_allows_reasoning_and_one_call(before: str) -> None:
    for header in HEADERS:
        assert allows("openai", REQUIRED, before + header.format("f") + GOOD)
        assert not allows("openai", AUTO, before + header.format("f") + BAD)
        assert allows("openai", AUTO, before + header.format("f_g") + OTHER)
    final = "<|channel|>final<|message|>Hi {}"
    assert allows("openai", AUTO, before + final)
    assert not allows("openai", REQUIRED, before + final)
    assert not allows("openai", REQUIRED, before + HEADERS[0].format("f") + GOOD + PREAMBLE)
    assert not allows("openai", ToolChoice("required", name="f_g"), before + HEADERS[0].format("f") + GOOD)


def test_harmony_content_constraint_is_for_the_final_message() -> None:
    constraint = get_tool_format("openai").content_constraint({"type": "json_schema", "json_schema": SCHEMA})
    for before in ("", "<|start|>assistant", THINK):
        assert matches("openai", constraint, f"{before}<|channel|>final<|message|>{GOOD}")
        assert not matches("openai", constraint, f"{before}<|channel|>final<|message|>{BAD}")
        assert not matches("openai", constraint, before + GOOD)


@pytest.mark.parametrize("name", CALLS)
def test_constraint_that_is_refused_names_the_tool(name: str) -> None:
    unsupported = {"type": "object", "properties": {"b": {"not": {}}}}
    schema = {"type": "object", "properties": {"a": unsupported}}
    place = "(, first at #/properties/a/properties/b)?"  # parameters in XML are schemas of their own
    for param, reason in (("tools[2].parameters", r"`tools\[2\].parameters`: "), ("", "behind '[^']*odd_one")):
        odd = Tool(name="odd_one", parameters=schema, strict=True, param=param)
        constraint = format_of(name).constraint([*TOOLS, odd], AUTO)
        assert constraint is not None
        with pytest.raises(InvalidRequest, match=rf"(?s){reason}.*not supported: `not`{place};") as refused:
            matches(name, constraint, "")
        assert refused.value.param == (param or PARAM)


TOO_DEEP = functools.reduce(lambda inner, _: {"properties": {"a": inner}}, range(200), {})


@pytest.mark.parametrize("name", ["hermes", "glm45", "openai"])
@pytest.mark.parametrize(("parameters", "reason"), [(TOO_DEEP, "nested"), ({"not": {}}, "`not`[,;]")])
def test_constraint_that_is_refused_names_the_schema_alone_that_is_wrong(
    name: str, parameters: dict[str, Any], reason: str
) -> None:
    tool_format, wrong = format_of(name), parameters | {"type": "object"}
    tools = [Tool(name=f"f{n}", parameters=wrong if n else SCHEMA, param=f"tools[{n}].parameters") for n in range(2)]
    for used, content, param in ((tools, SCHEMA, "tools[1].parameters"), (tools[:1], wrong, PARAM)):
        calls = tool_format.constraint(used, REQUIRED)
        assert calls is not None
        content_form = tool_format.content_constraint({"type": "json_schema", "json_schema": content})
        with pytest.raises(InvalidRequest, match=reason) as refused:
            matches(name, {"type": "or", "elements": [calls, content_form]}, "")
        assert refused.value.param == param


def test_constraint_that_only_xml_cannot_follow_names_the_schema() -> None:
    parameters = {"type": "object", "patternProperties": {"a": {}}}
    constraint = format_of("glm45").constraint([Tool(name="f", parameters=parameters, param="tools[0].x")], REQUIRED)
    assert constraint is not None
    with pytest.raises(InvalidRequest, match=r"`tools\[0\]\.x`: .*not supported: \['patternProperties'\]") as refused:
        matches("glm45", constraint, "")
    assert refused.value.param == "tools[0].x"
