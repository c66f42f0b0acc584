"""Splits answers whole and in pieces, for the tests of all formats."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from eagleray.client.answers.formats import ToolFormat
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


def json_texts(*markers: str) -> st.SearchStrategy[str]:
    """Return strings with escapes, brackets, several alphabets, and the markers of a format."""
    special = [
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        "\\u00e9",
        "\n",
        "\t",
        "'",
        ":",
        ",",
        ";",
        "</",
        "é",
        "日本",
        "🙂",
        "\x01",
    ]
    return st.lists(st.sampled_from([*special, *markers, "a", "Paris"]), max_size=6).map("".join)


def json_arguments(texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Return arguments with nested values."""
    scalars = (
        st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    )
    values = st.recursive(
        scalars | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=5,
    )
    return st.dictionaries(texts, values, max_size=3)
