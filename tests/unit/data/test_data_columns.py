"""Values of rows as prompts, parameters and adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eagleray.data.columns import adapter_of, messages_of, params_of, prompt_of, text_of, tools_of
from eagleray.errors import InvalidRequest
from eagleray.messages.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize("value", ["", "Hello", [], [1, 2], np.array([1, 2])])
def test_prompt_of_text_or_token_ids_are_returned(value: Any) -> None:
    expected = value.tolist() if isinstance(value, np.ndarray) else value
    assert prompt_of({"q": value}, "q") == expected


@pytest.mark.parametrize("value", [None, 3, 0.5, b"bytes", ["a"], [1.5], [True], {"role": "user"}, np.array([0.5])])
def test_prompt_of_another_type_names_the_column(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"column 'q' has .* where a prompt is expected: convert it"):
        prompt_of({"q": value}, "q")


def test_text_of_another_type_names_the_column() -> None:
    assert text_of({"q": "Hello"}, "q") == "Hello"
    with pytest.raises(InvalidRequest, match="column 'q' has no value where a text is expected"):
        text_of({"q": None}, "q")


def test_messages_of_conversation_has_no_fields_of_other_messages() -> None:
    messages = [
        {"role": "user", "content": "Hi", "tool_calls": None},
        {"role": "assistant", "content": [{"text": None}]},
    ]
    assert messages_of({"m": messages}, "m") == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{}]},
    ]


@pytest.mark.parametrize("value", [None, [], "Hi", ["Hi"], {"role": "user"}])
def test_messages_of_another_type_names_the_column(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"column 'm' has .* where a conversation is expected"):
        messages_of({"m": value}, "m")


def test_params_of_row_changes_what_is_not_null() -> None:
    row = {"p": {"max_tokens": 3, "top_k": None, "logit_bias": {"17": 2.0, "18": None}}, "s": 7}
    params = params_of(row, {"max_tokens": 9, "top_k": 5, "seed": 1}, column="p", seed="s")
    assert (params.max_tokens, params.top_k, params.seed, params.logit_bias) == (3, 5, 7, {17: 2.0})


def test_params_of_row_without_values_are_the_defaults() -> None:
    params = params_of({"p": None, "s": None}, {"max_tokens": 9, "seed": 1}, column="p", seed="s")
    assert (params.max_tokens, params.seed) == (9, 1)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"max_token": 3}, r"no field 'max_token'; did you mean `max_tokens`\?"),
        ({"temperature": -1.0}, "temperature"),
        ({"logit_bias": {"a": 1.0}}, "'a' where a token id is expected"),
        ({"n": 2}, "a row has one completion"),
        ({"stop": 5}, "`stop` must be a list"),
        ({"bad_words": 5}, "`bad_words` must be a list"),
        ({"allowed_token_ids": 5}, "`allowed_token_ids` must be a list"),
        ({"logit_bias": 5}, "`logit_bias` must be a mapping"),
        ("max_tokens", "where sampling parameters are expected"),
        (
            {"structured_outputs": {"json": {"type": "object"}}},
            "schema as a dictionary, which Arrow changes",
        ),
        ({"structured_outputs": {"json": "{}", "regex": "a"}}, "needs exactly one of"),
    ],
)
def test_params_of_wrong_row_says_what_is_wrong(own: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        params_of({"p": own}, {}, column="p", seed=None)


def test_params_of_row_has_the_constraint_that_is_not_null() -> None:
    own = {"structured_outputs": {"json": None, "regex": "a+", "disable_any_whitespace": None}}
    constraint = params_of({"p": own}, {}, column="p", seed=None).structured_outputs
    assert constraint == StructuredOutputsParams(regex="a+")


def test_tools_of_text_is_a_list_of_json() -> None:
    assert tools_of({"t": None}, "t") is None
    assert tools_of({"t": '[{"type": "function"}]'}, "t") == [{"type": "function"}]
    for value, said in (("[", "are not valid JSON"), ("{}", "must have JSON lists"), ([], "a text is expected")):
        with pytest.raises(InvalidRequest, match=f"column 't'.* {said}"):
            tools_of({"t": value}, "t")


def test_adapter_of_unknown_name_says_which_there_are() -> None:
    assert adapter_of({"a": "pirate"}, "a", ["pirate"]) == "pirate"
    assert adapter_of({"a": None}, "a", ["pirate"]) is None
    assert adapter_of({}, None, []) is None
    with pytest.raises(InvalidRequest, match=r"names adapter \['pirate'\], but"):
        adapter_of({"a": ["pirate"]}, "a", ["pirate"])
    with pytest.raises(InvalidRequest, match="names adapter 'poet', but the option `lora_modules` names pirate"):
        adapter_of({"a": "poet"}, "a", ["pirate"])
