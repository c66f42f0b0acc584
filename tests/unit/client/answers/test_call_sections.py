"""Calls of DeepSeek and Kimi K2, which stand in sections."""

from __future__ import annotations

import pytest
from answer_checks import answer_of, split_whole

from eagleray.client.answers.parts import CallBegin
from eagleray.client.answers.tool_formats import find_tool_format, get_tool_format

V3 = get_tool_format("deepseek_v3")
V31 = get_tool_format("deepseek_v31")
KIMI = get_tool_format("kimi_k2")

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"


def v3(name: str, arguments: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEP}{arguments}{CALL_END}"


def kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}{ARGUMENTS}{arguments}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello\n```json\n{}\n```\n", "Hello\n```json\n{}\n```\n", []),
        (f"A\n{BEGIN}{v3('f', '{}')}\n{v3('g', '[1]')}{END}", "A", [("f", "{}"), ("g", "[1]")]),
        (BEGIN + v3("f", f'{{"a": "\\n```{CALL_END}"}}') + END, "", [("f", f'{{"a": "\\n```{CALL_END}"}}')]),
        (f"{BEGIN}{CALL}function{SEP}f\n{{}}{CALL_END}{END}", "", [("f", "{}")]),
        (f"{BEGIN}{v3('f', '')}{END}", "", [("f", "{}")]),
        (f"{BEGIN}{v3('f', '{')}{END}\nB", "\nB", [("f", "{")]),
        (f"{BEGIN}{v3('f', 'x y')}", "", [("f", "x y")]),
        (v3("f", "{}"), "", [("f", "{}")]),
        (f"{BEGIN}{CALL}\n{v3('f', '{}').removeprefix(CALL)}{END}", "", [("f", "{}")]),
        (f'{BEGIN}{CALL}function{SEP}f\n```json\n{{"a": "b', "", [("f", '{"a": "b')]),
        (f"{BEGIN}{CALL}function{SEP}f\n```json\n{{}}\n```", "", [("f", "{}")]),
        (f"{BEGIN}{CALL}function{SEP}f\n```json\n{{}}\n```{END}B", "B", [("f", "{}")]),
        (f"{BEGIN}{CALL}function{SEP}f\n", "", [("f", "")]),
        (f"A {BEGIN}{CALL}function{SEP}f", f"A {BEGIN}{CALL}function{SEP}f", []),
        (f"{BEGIN}{CALL}function{SEP}\n", f"{BEGIN}{CALL}function{SEP}\n", []),
        (f"{BEGIN}{v3('f', '{}')}\n{CALL}f\n{CALL_END}", f"\n{CALL}f\n{CALL_END}", [("f", "{}")]),
        (f"{BEGIN} none", f"{BEGIN} none", []),
    ],
)
def test_deepseek_v3_answer_at_any_cut_is_split(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert answer_of(split_whole(V3, text)) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"A\n\n{BEGIN}{v31('f', '{}')}{v31('g', ' [1] ')}{END}", "A", [("f", "{}"), ("g", "[1]")]),
        (f"{BEGIN}{v31('f', '')}{END}", "", [("f", "{}")]),
        (f"{BEGIN}{CALL}f{SEP}", "", [("f", "")]),
        (f"{BEGIN}{CALL}f", f"{BEGIN}{CALL}f", []),
        (f"{BEGIN}{CALL}{v31('f', '{}')}{END}", f"{BEGIN}{CALL}{CALL}f{SEP}{{}}{CALL_END}{END}", []),
        (f"{BEGIN}{v31(' ', '{}')}{END}", f"{BEGIN}{v31(' ', '{}')}{END}", []),
    ],
)
def test_deepseek_v31_answer_at_any_cut_is_split(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert answer_of(split_whole(V31, text)) == (content, calls)


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        (f"{SECTION}{kimi('functions.f:0', '{}')}{kimi('functions.a.b:1', '{}')}{SECTION_END}", ["f 0", "a.b 1"]),
        (f"{SECTION}\n{kimi(' functions.f:2 ', '{}')}\n{SECTION_END}", ["f 2"]),
    ],
)
def test_kimi_k2_ids_are_those_of_the_calls(text: str, begins: list[str]) -> None:
    names_and_numbers = [begin.split() for begin in begins]
    expected = [
        CallBegin(index, name, f"functions.{name}:{number}") for index, (name, number) in enumerate(names_and_numbers)
    ]
    assert [part for part in split_whole(KIMI, text) if isinstance(part, CallBegin)] == expected


@pytest.mark.parametrize(
    ("header", "call_id"), [("search:2", "search:2"), ("search", None), ("functions.search", None)]
)
def test_kimi_k2_header_in_another_form_has_a_name(header: str, call_id: str | None) -> None:
    begin, *_ = split_whole(KIMI, f"{SECTION}{kimi(header, '{}')}{SECTION_END}")
    assert begin == CallBegin(0, "search", call_id)


def test_kimi_k2_call_without_name_is_content() -> None:
    text = f"A{SECTION}{kimi('', '{}')}{SECTION_END}"
    assert answer_of(split_whole(KIMI, text)) == (text, [])


def test_find_tool_format_block_of_json_tells_deepseeks_formats_apart() -> None:
    template = f"{BEGIN}{CALL}{{{{ name }}}}{SEP}{{{{ arguments }}}}{CALL_END}{END}"
    assert find_tool_format(template) is V31
    assert find_tool_format(template.replace("{{ arguments }}", "\n```json\n{{ arguments }}\n```")) is V3
