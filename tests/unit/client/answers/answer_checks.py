"""Splits answers whole and in pieces, for the tests of all formats."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest

from eagleray.client.answers.formats import ToolFormat
from eagleray.client.answers.marker_search import MarkerFound, MarkerSearch
from eagleray.client.answers.part_writer import join_parts
from eagleray.client.answers.parts import AnswerPart, CallArguments, CallBegin, Content, Splitter
from eagleray.client.answers.tools import Tool


class Answer(NamedTuple):
    """The parts of an answer, as an API sends them."""

    content: str
    calls: list[tuple[str, str]]
    """Names and texts of arguments."""


def split(splitter: Splitter, pieces: Iterable[str]) -> list[AnswerPart]:
    """Return the joined parts of an answer that comes in pieces."""
    parts = [part for piece in pieces for part in splitter.push(piece)]
    return join_parts(parts + splitter.finish())


def split_whole(tool_format: ToolFormat, text: str, tools: Sequence[Tool] = ()) -> list[AnswerPart]:
    """Return the parts of an answer, after checking that they are the same however the answer is cut in two, and when
    it comes character by character."""
    whole = split(tool_format.splitter(tools), [text])
    assert split(tool_format.splitter(tools), text) == whole
    for cut in range(1, len(text)):
        assert split(tool_format.splitter(tools), [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])
    return whole


def count_searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of characters of every search for markers."""
    searched: list[int] = []
    find = MarkerSearch.find

    def count(self: MarkerSearch, text: str, start: int = 0, is_last: bool = False) -> MarkerFound:
        searched.append(len(text) - start)
        return find(self, text, start, is_last)

    monkeypatch.setattr(MarkerSearch, "find", count)
    return searched


def answer_of(parts: Iterable[AnswerPart]) -> Answer:
    """Collect parts. Checks that calls are numbered in order, and that arguments belong to the call before them."""
    answer = Answer("", [])
    for part in parts:
        if isinstance(part, Content):
            answer = answer._replace(content=answer.content + part.text)
        elif isinstance(part, CallBegin):
            assert part.call == len(answer.calls)
            answer.calls.append((part.name, ""))
        else:
            assert isinstance(part, CallArguments)
            assert part.call == len(answer.calls) - 1
            name, arguments = answer.calls[-1]
            answer.calls[-1] = (name, arguments + part.text)
    return answer


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    """Cut a text at some of its indices."""
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


SPECIAL = (*"{}[]\"\\\n\t':,;a\x01", "\\u00e9", "</", "é", "日本", "🙂")


def random_text(random: Random, markers: Sequence[str]) -> str:
    """Return a string with escapes, brackets, several alphabets, and markers of formats."""
    return "".join(random.choices([*SPECIAL, *markers], k=random.randrange(6)))


def random_value(random: Random, markers: Sequence[str], depth: int = 0) -> Any:
    """Return a JSON value, nested up to three times."""
    number = random.choice([0, -7, 10**20, 0.5, 1e-7, -2.5e30])
    match random.choice(["text", "text", "number", "constant", *(["list", "object"] if depth < 3 else [])]):
        case "text":
            return random_text(random, markers)
        case "number":
            return number
        case "constant":
            return random.choice([None, True, False])
        case "list":
            return [random_value(random, markers, depth + 1) for _ in range(random.randrange(3))]
        case _:
            return random_object(random, markers, depth + 1)


def random_object(random: Random, markers: Sequence[str], depth: int = 0) -> dict[str, Any]:
    """Return a JSON object with nested values."""
    keys = [random_text(random, markers) for _ in range(random.randrange(4))]
    return {key: random_value(random, markers, depth) for key in keys}
