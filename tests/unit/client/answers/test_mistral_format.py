"""Calls of Mistral's models."""

from __future__ import annotations

import re

import pytest
from answer_checks import answer_of, split_whole

from eagleray.client.answers.parts import CallArguments, CallBegin
from eagleray.client.answers.tool_formats import get_tool_format

MISTRAL = get_tool_format("mistral")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('A [TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}, "id": "123456789"}]', "A", [("f", '{"a": "]"}')]),
        (
            '[TOOL_CALLS][{"arguments": {}, "name": "f"},\n{"name": "g", "arguments": "{\\"a\\": 1}"}] B',
            " B",
            [("f", "{}"), ("g", '{"a": 1}')],
        ),
        ('[TOOL_CALLS] {"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ('[TOOL_CALLS][TOOL_CALLS]f[ARGS]{"a": "[ARGS]"}[TOOL_CALLS]g{}', "", [("f", '{"a": "[ARGS]"}'), ("g", "{}")]),
        ('[TOOL_CALLS] f [ARGS] {"a": {}}\nB', "\nB", [("f", '{"a": {}}')]),
        ("[TOOL_CALLS]f[ARGS]a, b[TOOL_CALLS]g[ARGS]", "", [("f", "a, b"), ("g", "")]),
        ('[TOOL_CALLS]f[ARGS]{"a": [1}', "", [("f", '{"a": [1}')]),
        ('[TOOL_CALLS]f[ARGS]{"a": [TOOL_CALLS]g{}', "", [("f", '{"a": '), ("g", "{}")]),
        ("[TOOL_CALLS]f[CALL_ID]1234", "", [("f", "")]),
        ("[TOOL_CALLS]f", "[TOOL_CALLS]f", []),
        ('[TOOL_CALLS]"f"{}', '[TOOL_CALLS]"f"{}', []),
        ("[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS][ARGS]{}", []),
        ("A [TOOL_CALLS] I call f", "A [TOOL_CALLS] I call f", []),
        ("[TOOL_CALLS] [] [TOOL_", "[TOOL_CALLS] [] [TOOL_", []),
    ],
)
def test_mistral_answer_at_any_cut_is_split(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert answer_of(split_whole(MISTRAL, text)) == (content, calls)


def test_mistral_call_with_id_keeps_id() -> None:
    parts = split_whole(MISTRAL, "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}")
    assert parts == [CallBegin(0, "f", "123456789"), CallArguments(0, "{}")]


def test_mistral_made_ids_are_those_that_templates_take() -> None:
    first, second = MISTRAL.make_call_id(), MISTRAL.make_call_id()
    assert re.fullmatch("[a-zA-Z0-9]{9}", first)
    assert first != second
