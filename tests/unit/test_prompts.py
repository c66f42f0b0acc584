"""Prompts as users of the Python API write them."""

from __future__ import annotations

import pytest

from eagleray.errors import InvalidRequest
from eagleray.prompts import parse_prompt


@pytest.mark.parametrize("prompt", [None, 7, b"text", {"prompt_token_ids": 7}, {"prompt_token_ids": "text"}])
def test_parse_prompt_that_is_neither_text_nor_ids_raises(prompt):
    with pytest.raises(InvalidRequest, match="a prompt is a text, a list of token ids, or a dictionary"):
        parse_prompt(prompt)
