"""Prompts as users of the Python API write them."""

from __future__ import annotations

import pytest

from eagleray.errors import InvalidRequest
from eagleray.prompts import chat_prompts, parse_prompt


@pytest.mark.parametrize("prompt", [None, 7, b"text", {"prompt_token_ids": 7}, {"prompt_token_ids": "text"}])
def test_parse_prompt_that_is_neither_text_nor_ids_raises(prompt):
    with pytest.raises(InvalidRequest, match="a prompt is a text, a list of token ids, or a dictionary"):
        parse_prompt(prompt)


class FakeTokenizer:
    def apply_chat_template(self, conversation, **options):
        if "content" not in conversation[0]:
            raise InvalidRequest("`messages[0].content` is missing")
        return "text"

    def encode(self, text, *, add_special_tokens):
        return [1]


def test_chat_prompts_wrong_conversation_of_several_is_named():
    right, wrong = [{"role": "user", "content": "x"}], [{"role": "user"}]
    with pytest.raises(InvalidRequest, match=r"^prompt 1: `messages\[0\].content` is missing"):
        chat_prompts([right, wrong], FakeTokenizer())
    with pytest.raises(InvalidRequest, match=r"^`messages\[0\].content` is missing"):
        chat_prompts(wrong, FakeTokenizer())
