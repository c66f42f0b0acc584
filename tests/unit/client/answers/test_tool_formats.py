"""Properties of every format of tool calls: the calls that a template writes are found again, wherever they are cut."""

from __future__ import annotations

import json
from functools import partial
from random import Random
from typing import Any

import pytest
from answer_checks import answer_of, count_searched, pieces_of, random_object, random_text, random_value, split
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_templates import FAMILIES

from eagleray.client.answers.parts import CallBegin
from eagleray.client.answers.tool_formats import find_tool_format, get_tool_format
from eagleray.client.answers.tools import Tool, ToolChoice
from eagleray.errors import ConfigError

NAMES = ("get_weather", "f", "look-up_2")
CONTENT = ("", "Let me look.", "A <tool {1, 2} [TOOL\n<b>é🙂</b>")
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f"', "</")
MARKERS += ("<arg_key>", "```", "<｜tool▁call▁end｜>", "<|tool_call_end|>", "<|tool_calls_section_end|>")
PIECES = [*MARKERS, "[CALL_ID]", "<function=", "</function>", "<parameter=", "</parameter>", "</tool_call>", "{", "}"]
PIECES += ["</arg_key>", "<arg_value>", "</arg_value>", "```json\n", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"]
PIECES += ["<｜tool▁sep｜>", "<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"]
PIECES += ["<|tool_call_argument_begin|>", "functions.f:0"]
PIECES += [*'[]":,;>f\n', '"name"', '"arguments"', '"f"', '{"name": "f", "parameters": {']
TYPES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "items": {"type": "array"},
    "options": {"type": "object"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
TOOLS = [Tool(name=name, parameters={"properties": TYPES}) for name in NAMES]


def typed_arguments(random: Random) -> dict[str, Any]:
    """Return arguments that follow `TYPES`."""
    markers = [*MARKERS, "<parameter=", "</function>"]
    values = {
        "text": random_text(random, markers).replace("\n<p", "<p"),  # where a value ends
        "count": random.choice([0, -3, 10**20]),
        "ratio": random.choice([0.5, 1e-7, 3, -2.5e30]),
        "flag": random.choice([True, False]),
        "items": [random_value(random, MARKERS)],
        "options": random_object(random, MARKERS),
        "maybe": random.choice([None, 5]),
    }
    return {name: values[name] for name in random.sample(list(values), random.randrange(len(values)))}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(st.integers(0))
def test_tool_format_calls_of_template_in_pieces_are_found(family: str, seed: int) -> None:
    random = Random(seed)
    splitter = partial(get_tool_format(FAMILIES[family].tool_format).splitter, TOOLS)
    make = typed_arguments if family in ("glm45", "glm47", "qwen3_coder") else partial(random_object, markers=MARKERS)
    calls = [(random.choice(NAMES), make(random)) for _ in range(random.randint(1, 3))]
    content, after = random.choice(CONTENT), random.choice(["", "\n", "\nDone."])
    text = FAMILIES[family].write(content, calls) + after
    whole = split(splitter(), [text])
    answer = answer_of(whole)
    assert answer.content.split() == (content + after).split()
    assert answer.content.startswith(content)
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == calls
    assert split(splitter(), text) == whole
    for num_cuts in (1, 2, 8):
        assert split(splitter(), pieces_of(text, random.choices(range(len(text)), k=num_cuts))) == whole


@pytest.mark.parametrize("name", sorted({family.tool_format for family in FAMILIES.values()}))
@settings(max_examples=40)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=20).map("".join),
    cuts=st.lists(st.integers(0, 99), max_size=8),
)
def test_tool_format_any_text_in_pieces_agrees_with_whole(name: str, text: str, cuts: list[int]) -> None:
    tool_format = get_tool_format(name)
    whole = split(tool_format.splitter(TOOLS), [text])
    assert split(tool_format.splitter(TOOLS), text) == whole
    assert split(tool_format.splitter(TOOLS), pieces_of(text, cuts)) == whole
    if not answer_of(whole).calls:
        assert answer_of(whole).content == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}}]'),
    ],
)
def test_tool_format_call_that_is_cut_off_anywhere_leaves_no_marker_in_the_content(name: str, text: str) -> None:
    begun = 0
    for cut in range(len(text) + 1):
        parts = split(get_tool_format(name).splitter([Tool(name="f")]), [text[:cut]])
        if any(isinstance(part, CallBegin) for part in parts):
            begun += 1
            assert answer_of(parts).content == "", text[:cut]
    assert begun > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_tool_format_long_call_in_characters_is_searched_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = count_searched(monkeypatch)
    arguments = {"text": 'a <b> {[" </' * 200, "options": {"c": "[" * 2000}}
    text = FAMILIES[family].write("", [("f", arguments)])
    parts = split(get_tool_format(FAMILIES[family].tool_format).splitter(TOOLS), text)
    assert json.loads(answer_of(parts).calls[0][1]) == arguments
    longest = max(map(len, get_tool_format(FAMILIES[family].tool_format).markers))
    assert sum(searched) < (longest + 2) * len(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_find_tool_format_template_of_family_has_most_specific(family: str) -> None:
    found = find_tool_format(FAMILIES[family].template)
    assert found is not None
    assert found.name == FAMILIES[family].tool_format


APRIEL = """Return all function calls as a list of json objects within <tool_call></tool_call> XML tags:
<tool_calls>[{"name": <function-name-1>, "arguments": <args-dict-1>},...]</tool_calls>"""
"""Calls in the template of Apriel-1.5, whose format is not known here."""


def test_find_tool_format_template_without_known_calls_has_none() -> None:
    assert find_tool_format("{{ messages[0].content }}") is None
    assert find_tool_format(APRIEL) is None


@pytest.mark.parametrize(("name", "expected"), [("qwen3_xml", "qwen3_coder"), ("hermes", "hermes")])
def test_get_tool_format_further_name_is_found(name: str, expected: str) -> None:
    assert get_tool_format(name).name == expected


def test_get_tool_format_unknown_name_raises_with_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no format 'hermess'; use auto, none or one of deepseek_v3, deepseek_v31"):
        get_tool_format("hermess")


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_tool_format_constraint_has_letters_of_names_as_templates_write_them(name: str) -> None:
    constraint = get_tool_format(name).constraint([Tool(name="größe")], ToolChoice("required"))
    assert '"name": "größe"' in str(constraint)
