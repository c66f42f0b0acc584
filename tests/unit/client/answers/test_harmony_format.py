"""Reasoning, content and calls of gpt-oss."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

import pytest
from answer_checks import pieces_of, random_object, random_text, split
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleray.client.answers.harmony import HarmonyFormat, HarmonyReasoning
from eagleray.client.answers.parts import AnswerPart, CallArguments, CallBegin, Content, Reasoning, Splitter
from eagleray.client.answers.text_reader import WHITE_SPACE
from eagleray.client.answers.tool_formats import get_tool_format
from eagleray.client.answers.tools import Tool

TOOLS = [Tool(name="f"), Tool(name="bare")]
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
NEXT = "<|start|>assistant"
THINK = "<|channel|>analysis<|message|>Hm.<|end|>"
CALL = [CallBegin(0, "f"), CallArguments(0, "{}")]


def with_reasoning(prompt: str = PROMPT) -> Splitter:
    return HarmonyReasoning().splitter(prompt, HarmonyFormat().splitter(TOOLS))


def split_at_every_place(make: Callable[[], Splitter], text: str) -> list[AnswerPart]:
    whole = split(make(), [text])
    assert split(make(), text) == whole
    for cut in range(1, len(text)):
        assert split(make(), [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])
    return whole


@pytest.mark.parametrize(
    "call",
    [
        " to=functions.f<|channel|>commentary json<|message|>{}",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.f<|constrain|>json<|message|> {} <|call|>",
        " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|end|>",
        "<|channel|>analysis to=functions.f code<|message|>{}<|call|>",
        "<|channel|>commentary to=f<|message|>{}",
        "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}",
    ],
)
def test_harmony_call_with_any_order_of_header_is_found(call: str) -> None:
    assert split_at_every_place(with_reasoning, call) == CALL
    expected = [Reasoning("Hm."), *CALL]
    assert split_at_every_place(with_reasoning, THINK + call) == expected
    assert split_at_every_place(with_reasoning, THINK + NEXT + call.removeprefix(NEXT)) == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{THINK}{NEXT}<|channel|>final<|message|>A\n<|return|>", [Reasoning("Hm."), Content("A\n")]),
        (THINK, [Reasoning("Hm.")]),
        ("<|channel|>analysis<|message|>Hm", [Reasoning("Hm")]),
        (f"{THINK}{NEXT}{THINK}{NEXT}<|channel|>final<|message|>", [Reasoning("Hm.\nHm.")]),
        (
            f"{THINK}{NEXT}<|channel|>commentary<|message|>First.\n<|end|>{NEXT} to=functions.f<|channel|>commentary"
            " json<|message|>{}<|call|>",
            [Reasoning("Hm."), Content("First."), *CALL],
        ),
        (
            f"<|channel|>commentary<|message|>A<|end|>{NEXT}<|channel|>final<|message|>B<|return|>",
            [Content("A\nB")],
        ),
        (
            f"<|channel|>analysis<|message|>A{NEXT}<|channel|>final<|message|>B<|channel|> C",
            [Reasoning("A"), Content("B<|channel|> C")],
        ),
        (
            f" to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>{NEXT} to=functions.g"
            '<|channel|>commentary json<|message|>{"a": "<|call|>',
            [*CALL, CallBegin(1, "g"), CallArguments(1, '{"a": "<|call|>')],
        ),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [Reasoning("1 + 1")]),
        ("<|channel|>analysis to=bare code<|message|>1<|call|>", [CallBegin(0, "bare"), CallArguments(0, "1")]),
        ("<|channel|>commentary to=assistant<|message|>A<|end|>", [Content("A")]),
        ("<|message|>A", [Content("A")]),
        ("Hello, to=functions.f", [Content("Hello, to=functions.f")]),
        ("  Hello<|end|>", [Content("  Hello")]),
        ("<|chan", [Content("<|chan")]),
        (f"{THINK}{NEXT}<|channel|>fin", [Reasoning("Hm.")]),
        (
            f"{THINK}{NEXT} to=functions.f<|channel|>comm",
            [Reasoning("Hm."), Content(f"{NEXT} to=functions.f<|channel|>comm")],
        ),
        ("<|channel|>final Hello<|end|>", [Content("<|channel|>final Hello<|end|>")]),
        (f" to=functions.f<|end|>{NEXT}<|channel|>final<|message|>A", [Content(" to=functions.f<|end|>\nA")]),
        ("<|channel|>commentary to=functions.f json<|message|>", [CallBegin(0, "f")]),
        ("", []),
    ],
)
def test_harmony_answer_at_any_cut_is_split(text: str, parts: list[AnswerPart]) -> None:
    assert split_at_every_place(with_reasoning, text) == parts


@pytest.mark.parametrize(
    ("prompt", "text", "parts"),
    [
        (f"{PROMPT}<|channel|>final<|message|>Once ", "upon", [Content("upon")]),
        (f"{PROMPT}<|channel|>analysis<|message|>", f"Hm.<|end|>{NEXT} to=functions.f<|message|>{{}}", None),
        (f"{PROMPT} to=functions.f<|channel|>commentary json<|message|>", "{}", CALL),
        (f"{PROMPT} to=functions.f<|channel|>commentary ", "json<|message|>{}", CALL),
        (f"{PROMPT}<|channel|>", "analysis<|message|>A", [Reasoning("A")]),
        (f"{PROMPT}<|channel|>final<|message|>A<|end|>", "B", [Content("B")]),
        ("Some text", "B", [Content("B")]),
    ],
)
def test_harmony_answer_goes_on_with_the_message_of_its_prompt(
    prompt: str, text: str, parts: list[AnswerPart] | None
) -> None:
    expected = [Reasoning("Hm."), *CALL] if parts is None else parts
    assert split_at_every_place(lambda: with_reasoning(prompt), text) == expected
    assert HarmonyReasoning().begins_reasoning(prompt) == (parts is None)


@settings(max_examples=40)
@given(st.integers(0))
def test_harmony_messages_in_pieces_are_found(seed: int) -> None:
    random = Random(seed)
    markers = ("to=", "<|", "<|ret", "{", "<|channel|>")
    reasoning, preambles = ([f"x{random_text(random, markers)}" for _ in range(random.randrange(3))] for _ in range(2))
    arguments = json.dumps(random_object(random, markers), ensure_ascii=random.choice([True, False]))
    messages = [f"<|channel|>analysis<|message|>{text}<|end|>" for text in reasoning]
    messages += [f"<|channel|>commentary<|message|>{text}<|end|>" for text in preambles]
    header = random.choice([" to=functions.{}<|channel|>commentary", "<|channel|>commentary to=functions.{}"])
    constrain = random.choice([" json", " <|constrain|>json", "<|constrain|>json"])
    messages.append(f"{header.format('f_1')}{constrain}<|message|>{arguments}{random.choice(['', '<|call|>'])}")
    text = NEXT.join(messages)
    whole = split(with_reasoning(), [text])
    assert "".join(part.text for part in whole if isinstance(part, Reasoning)) == "\n".join(reasoning)
    assert "".join(part.text for part in whole if isinstance(part, Content)) == "\n".join(preambles).rstrip(WHITE_SPACE)
    assert whole[-2:] == [CallBegin(0, "f_1"), CallArguments(0, arguments)]
    assert split(with_reasoning(), text) == whole
    for num_cuts in (1, 2, 8):
        assert split(with_reasoning(), pieces_of(text, random.choices(range(len(text)), k=num_cuts))) == whole


PIECES = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "assistant"]
PIECES += ["analysis", "commentary", "final", "to=functions.f", " to=bare", " json", '{"a": "', '"}', "<|", "\n", "x"]


@settings(max_examples=40)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=20).map("".join),
    cuts=st.lists(st.integers(0, 99), max_size=8),
)
def test_harmony_any_text_in_pieces_agrees_with_whole(text: str, cuts: list[int]) -> None:
    whole = split(with_reasoning(), [text])
    assert split(with_reasoning(), text) == whole
    assert split(with_reasoning(), pieces_of(text, cuts)) == whole


def test_harmony_tools_without_reasoning_find_the_same_parts() -> None:
    text = f"{THINK}{NEXT} to=functions.f<|message|>{{}}"
    assert split(get_tool_format("openai").splitter(TOOLS), text) == [Reasoning("Hm."), *CALL]


def test_harmony_reasoning_gives_content_to_another_splitter() -> None:
    text = f'{THINK}{NEXT}<|channel|>final<|message|><tool_call>{{"name": "f"}}</tool_call>'
    splitter = HarmonyReasoning().splitter(PROMPT, get_tool_format("hermes").splitter(TOOLS))
    assert split(splitter, text) == [Reasoning("Hm."), *CALL]


def test_harmony_calls_without_tools_are_content() -> None:
    text = f"{THINK}{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}"
    splitter = HarmonyReasoning().splitter(PROMPT, get_tool_format("hermes").splitter(TOOLS))
    assert split(splitter, text) == [Reasoning("Hm."), Content("{}")]
