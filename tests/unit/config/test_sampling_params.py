from __future__ import annotations

import math

import pytest

from eagleray import SamplingParams
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)


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
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", 1e9),
        ("temperature", 10**400),
        ("max_tokens", 10**400),
        ("top_k", 2**63),
        ("n", 2**63),
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
        ("logit_bias", {1: 10**400}),
        ("bad_words", [""]),
    ],
)
def test_sampling_params_invalid_value_names_field(field, value):
    with pytest.raises(InvalidRequest, match=f"`{field}`") as raised:
        SamplingParams(**{field: value})
    assert raised.value.param == field


@pytest.mark.parametrize(
    ("field", "value", "limit", "sent"),
    [
        ("stop", ["x"] * 100_000, MAX_STOP_STRINGS, "100000"),
        ("stop", "x" * 1_000_000, MAX_STOP_CHARS, "1000000"),
        ("bad_words", ["x"] * 100_000, MAX_BAD_WORDS, "100000"),
        ("bad_words", ["x" * 1000], MAX_BAD_WORD_CHARS, "1000"),
        ("stop_token_ids", [1] * 100_000, MAX_STOP_TOKEN_IDS, "100000"),
        ("logit_bias", dict.fromkeys(range(100_000), 1.0), MAX_LOGIT_BIASES, "100000"),
    ],
)
def test_sampling_params_too_long_list_names_limit_and_length(field, value, limit, sent):
    with pytest.raises(InvalidRequest, match=f"`{field}`") as raised:
        SamplingParams(**{field: value})
    assert f"at most {limit} " in str(raised.value) and f"has {sent}" in str(raised.value)
    assert raised.value.param == field


def test_sampling_params_lists_at_their_limits_are_taken():
    params = SamplingParams(stop=["x" * MAX_STOP_CHARS] * MAX_STOP_STRINGS, bad_words=["y"] * MAX_BAD_WORDS)
    assert len(params.stop_strings) == MAX_STOP_STRINGS


def test_sampling_params_error_shows_a_long_value_in_part():
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(max_tokens=-(10**4000))
    assert len(str(raised.value)) < 200


def test_sampling_params_contradicting_fields_are_refused():
    with pytest.raises(InvalidRequest, match="n > 1 with temperature 0"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(InvalidRequest, match="stop strings need the text"):
        SamplingParams(stop="x", detokenize=False)


def test_sampling_params_single_stop_string_is_a_list():
    assert SamplingParams(stop="x").stop_strings == ["x"]
    assert SamplingParams().stop_strings == []
