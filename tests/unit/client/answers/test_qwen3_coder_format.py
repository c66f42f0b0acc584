"""Calls of Qwen3-Coder."""

from __future__ import annotations

import pytest
from answer_checks import answer_of, split_whole

from eagleray.client.answers.parts import CallArguments, CallBegin
from eagleray.client.answers.tool_formats import get_tool_format
from eagleray.client.answers.tools import Tool

QWEN = get_tool_format("qwen3_coder")
TOOLS = [Tool(name="f", parameters={"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}})]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("A > B", "A > B", []),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
        ("<function=g><parameter=a>1</parameter></function>\nB", "\nB", [("g", '{"a": "1"}')]),
        ("A\n<function=f>\n<parameter=s>\n\n</parameter>\n</function>", "A", [("f", '{"s": ""}')]),
        ("<function=f>\n<parameter=s>\n</parameter>\n</function>", "", [("f", '{"s": ""}')]),
        ("<function=f>\n<parameter=s>\n\na\n\n</parameter>\n</function>", "", [("f", '{"s": "\\na\\n"}')]),
        ("<function=f>\n<parameter=s>\n</function>\n</parameter></function>", "", [("f", '{"s": "</function>"}')]),
        (
            "<tool_call><function=f><parameter=s>a\n</function>\nb\n</function>\n</parameter>\n</function></tool_call>",
            "",
            [("f", '{"s": "a\\n</function>\\nb\\n</function>"}')],
        ),
        ("<function=f>\n<parameter=s>\na\n</function>\n</tool_call>\nB", "\nB", [("f", '{"s": "a"}')]),
        ("<function=f>\n<parameter=s>\na\n<parameter=n>\n1\n</function>", "", [("f", '{"s": "a", "n": 1}')]),
        ("<function=f>\n<parameter=n>\n1\n</parameter>\n</tool_call>", "", [("f", '{"n": 1}')]),
        ("<function=f>\n<parameter=\n<parameter=n>1</parameter></function>", "", [("f", '{"n": 1}')]),
        ("<function=f>\n<parameter=s>\na", "", [("f", '{"s": "a')]),
        ("<function=f>\n<parameter=n>\n1", "", [("f", '{"n": 1')]),
        ("<function=f>\n<para", "", [("f", "")]),
        ("<tool_call>f>{}</tool_call>", "<tool_call>f>{}</tool_call>", []),
        ("<function=a b>", "<function=a b>", []),
        ("A\n<tool_call>\n<function=f", "A\n<tool_call>\n<function=f", []),
        ("<tool_call>B<function=f></function>", "<tool_call>B", [("f", "{}")]),
    ],
)
def test_qwen3_coder_answer_at_any_cut_is_split(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert answer_of(split_whole(QWEN, text, TOOLS)) == (content, calls)


def test_qwen3_coder_string_argument_comes_before_its_end() -> None:
    splitter = QWEN.splitter(TOOLS)
    assert splitter.push("<function=f>\n<parameter=s>\nHello\n") == [
        CallBegin(0, "f"),
        CallArguments(0, '{"s": "Hello'),
    ]
    assert splitter.push("you") == [CallArguments(0, "\\nyou")]
    assert splitter.push("\n</parameter>\n<parameter=n>\n12") == [CallArguments(0, '", "n": ')]
    assert splitter.push("3</parameter>") == [CallArguments(0, "123")]
