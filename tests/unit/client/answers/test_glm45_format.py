"""Calls of GLM-4.5 and GLM-4.7."""

from __future__ import annotations

import pytest
from answer_checks import answer_of, split_whole

from eagleray.client.answers.tool_formats import get_tool_format
from eagleray.client.answers.tools import Tool

GLM = get_tool_format("glm45")
SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "options": {"type": "object"}}}
TOOLS = [Tool(name="f", parameters=SCHEMA)]


def argument(key: str, value: str, between: str = "\n") -> str:
    return f"<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>{between}"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello\n", "Hello\n", []),
        (
            f"A\n<tool_call>f\n{argument('city', '7')}{argument('days', '7')}</tool_call>",
            "A",
            [("f", '{"city": "7", "days": 7}')],
        ),
        (f"<tool_call>f{argument('options', '{}', '')}</tool_call>", "", [("f", '{"options": {}}')]),
        ("<tool_call>f</tool_call>\n<tool_call>g\n</tool_call>\n", "", [("f", "{}"), ("g", "{}")]),
        (f"<tool_call>f{argument('city', '')}</tool_call>\nB", "\nB", [("f", '{"city": ""}')]),
        (
            f"<tool_call>f{argument('city', ' </tool_call><arg_key>')}</tool_call>",
            "",
            [("f", '{"city": " </tool_call><arg_key>"}')],
        ),
        (f"<tool_call>f{argument('days', 'many')}</tool_call>", "", [("f", '{"days": "many"}')]),
        (f"<tool_call>f{argument('other', 'x')}</tool_call>", "", [("f", '{"other": "x"}')]),
        ("<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Par", "", [("f", '{"city": "Par')]),
        ("<tool_call>f\n<arg_key>ci", "", [("f", "")]),
        (f"<tool_call>f\n<arg_key>a\n{argument('days', '1')}</tool_call>", "", [("f", '{"days": 1}')]),
        ("<tool_call>f<arg_key>a</arg_key>b<arg_key>c</tool_call>", "", [("f", "{}")]),
        ("A <tool_call>f", "A <tool_call>f", []),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ],
)
def test_glm45_answer_at_any_cut_is_split(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert answer_of(split_whole(GLM, text, TOOLS)) == (content, calls)


def test_glm45_tag_in_a_sentence_holds_no_text_back() -> None:
    splitter = GLM.splitter(TOOLS)
    text = "The tag <tool_call> begins "
    assert answer_of(splitter.push(text)) == (text.rstrip(), [])
