"""JSON values and white space in text that comes in pieces."""

from __future__ import annotations

import json
from random import Random

import pytest
from answer_checks import pieces_of, random_object
from hypothesis import given
from hypothesis import strategies as st

from eagleray.client.answers.text_reader import JSON_ENDS, JsonEnds, TextReader, json_ends


def read_value(pieces: list[str], ends: JsonEnds = JSON_ENDS) -> tuple[bool, str, str]:
    """Return whether a JSON value is complete, its text, and the text after it."""
    reader = TextReader()
    value: list[str] = []
    rest: list[str] = []
    results: list[bool] = []

    def read():
        results.append((yield from reader.read_json(value.append, ends)))
        while (yield from reader.peek()):
            rest.append((yield from reader.read_space()))
            rest.append((yield from reader.take(*'abcdefghijklmnopqrstuvwxyz<>/{}[]:,"1')) or "")

    reading = read()
    for piece in pieces:
        reader.push(piece)
        next(reading, None)
    reader.close()
    next(reading, None)
    return results[0], "".join(value), "".join(rest)


@given(st.integers(0), st.sampled_from(["", "}", " }", "</end>", "x"]), st.lists(st.integers(0)))
def test_read_json_object_in_pieces_ends_with_it(seed: int, rest: str, cuts: list[int]) -> None:
    text = json.dumps(random_object(Random(seed), ["</end>"]))
    assert read_value(pieces_of(text + rest, cuts), json_ends("</end>")) == (True, text, rest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12, 1", (True, "12", ", 1")),
        ("true}", (True, "true", "}")),
        ('"a\\"}" }', (True, '"a\\"}"', " }")),
        ("12", (False, "12", "")),
        ("nul</end>", (False, "nul", "</end>")),
        ('{"a": [1</end>', (False, '{"a": [1', "</end>")),
        ('{"a": "</end>"}', (True, '{"a": "</end>"}', "")),
        ('{"a\\', (False, '{"a\\', "")),
        ("", (False, "", "")),
        ("}", (False, "", "}")),
    ],
)
def test_read_json_at_any_cut_is_cut_off_where_text_ends(text: str, expected: tuple[bool, str, str]) -> None:
    for cut in range(len(text) + 1):
        assert read_value([text[:cut], text[cut:]], json_ends("</end>")) == expected
