from __future__ import annotations

import math

import pytest

from eagleray import SamplingParams
from eagleray.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("allowed_token_ids", []),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 101.0}),
        ("bad_words", [""]),
    ],
)
def test_a_senseless_value_names_its_field(field, value):
    with pytest.raises(InvalidRequest, match=f"`{field}`") as raised:
        SamplingParams(**{field: value})
    assert raised.value.param == field


def test_combinations_that_contradict_each_other():
    with pytest.raises(InvalidRequest, match="n > 1 with temperature 0"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(InvalidRequest, match="stop strings need the text"):
        SamplingParams(stop="x", detokenize=False)


def test_a_single_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="x").stop_strings == ["x"]
    assert SamplingParams().stop_strings == []
