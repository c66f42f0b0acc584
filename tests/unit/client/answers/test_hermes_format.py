"""Calls of Hermes and Qwen."""

from __future__ import annotations

import pytest
from answer_checks import answer_of, split_whole

from eagleray.client.answers.tool_formats import get_tool_format

HERMES = get_tool_format("hermes")
SURROGATE = r'"{\"a\": \"\ud800\"}"'
"""Arguments in a JSON string with half of a surrogate pair, as the model wrote them."""


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello\n", "Hello\n", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
        ('A \n<tool_call>{"arguments": {}, "name": "f"}</tool_call>\n', "A", [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>\nB', "\nB", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>', "", [("f", '{"a": [1}}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
        ('<tool_call>{"name": "f", {"a": 1}}</tool_call>', "", [("f", '{"a": 1}}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": "Paris"}</tool_call>', "", [("f", '"Paris"')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>', "", [("f", SURROGATE)]),
        (
            '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
            [],
        ),
        ("A\n<tool_call>f(1)</tool_call>\n", "A\n<tool_call>f(1)</tool_call>\n", []),
        (
            '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
            '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
            [],
        ),
        ('<tool_call>{"arguments": {"a": 1}', '<tool_call>{"arguments": {"a": 1}', []),
        ("A <tool_ca", "A <tool_ca", []),
    ],
)
def test_hermes_answer_at_any_cut_is_split(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert answer_of(split_whole(HERMES, text)) == (content, calls)
