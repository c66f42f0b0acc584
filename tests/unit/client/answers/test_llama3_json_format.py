"""Calls of Llama 3."""

from __future__ import annotations

import pytest
from answer_checks import answer_of, split_whole

from eagleray.client.answers.tool_formats import get_tool_format
from eagleray.client.answers.tools import Tool

LLAMA = get_tool_format("llama3_json")
TOOLS = [Tool(name="f"), Tool(name="g")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a": "; {"}}', "", [("f", '{"a": "; {"}')]),
        (' {"name": "f", "parameters": {}}; {"name": "g", "parameters": {}};\n', "", [("f", "{}"), ("g", "{}")]),
        ('A {"parameters": {}, "name": "f"} B', "A B", [("f", "{}")]),
        ('{"type": "function", "name": "f", "arguments": {}}', "", [("f", "{}")]),
        ('[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]', "", [("f", "{}"), ("g", "{}")]),
        ('<|python_tag|>{"name": "h", "parameters": {"a": 1}}', "", [("h", '{"a": 1}')]),
        ('<|python_tag|>search(q="a")', '<|python_tag|>search(q="a")', []),
        ('{"name": "h", "parameters": {}}', '{"name": "h", "parameters": {}}', []),
        ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
        ('{"age": 3, "name": "f"}', '{"age": 3, "name": "f"}', []),
        ("a [1, {2}] {b: {c", "a [1, {2}] {b: {c", []),
        ('{"name": "f", "parameters": {"a": [', "", [("f", '{"a": [')]),
        ('{"name": "f", "x": 1}', "1}", [("f", "")]),
    ],
)
def test_llama_answer_at_any_cut_is_split(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert answer_of(split_whole(LLAMA, text, TOOLS)) == (content, calls)
