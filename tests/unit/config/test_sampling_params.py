from __future__ import annotations

import math
import re

import pytest

from eagleray import RequestOutputKind, SamplingParams, StructuredOutputsParams
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RepetitionDetectionParams,
    resolve_all_logprobs,
)

VLLM_FIELDS = """n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
    prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
    include_stop_str_in_output output_kind stream_interval skip_clone structured_outputs logit_bias allowed_token_ids
    extra_args bad_words skip_reading_prefix_cache thinking_token_budget repetition_detection
    routed_experts_prompt_start trace_decode_token_ids watermarking"""


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
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("output_kind", 2),
        ("skip_reading_prefix_cache", 1),
        ("stream_interval", 0),
        ("prompt_logprob_start", -1),
        ("structured_outputs", {"json": {}, "regex": "a"}),
        ("structured_outputs", {"choices": ["a"]}),
        ("structured_outputs", "yes"),
        ("thinking_token_budget", -2),
        ("thinking_token_budget", True),
        ("repetition_detection", {"min_size": 2}),
        ("repetition_detection", 7),
        ("extra_args", {"a": 1}),
        ("watermarking", True),
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


@pytest.mark.parametrize(("choice", "name"), [("yes", "choice"), (["yes", 1], "choice[1]")])
def test_sampling_params_constraint_with_a_wrong_value_names_its_place(choice, name):
    with pytest.raises(InvalidRequest, match=re.escape(f"`structured_outputs.{name}`: expected")) as raised:
        SamplingParams(structured_outputs={"choice": choice})
    assert raised.value.param == f"structured_outputs.{name}"


def test_sampling_params_constraint_may_be_an_object_or_its_fields():
    constraint = StructuredOutputsParams(choice=["yes", "no"])
    assert SamplingParams(structured_outputs={"choice": ["yes", "no"]}).structured_outputs == constraint
    assert SamplingParams(structured_outputs=constraint).structured_outputs is constraint


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


def test_sampling_params_every_field_of_vllm_is_there():
    assert set(VLLM_FIELDS.split()) <= set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("output_kind", RequestOutputKind),
        ("stream_interval", (None, 1, 4)),
        ("prompt_logprob_token_ids", (None, [])),
        ("prompt_logprob_start", (None, 0, 7)),
        ("flat_logprobs", (False, True)),
        ("thinking_token_budget", (None, -1)),
        ("repetition_detection", (None, RepetitionDetectionParams())),
        ("trace_decode_token_ids", (None, [])),
        ("extra_args", (None, {})),
        ("watermarking", (None, False)),
        ("skip_clone", (False, True)),
        ("spaces_between_special_tokens", (False, True)),
        ("skip_reading_prefix_cache", (None, False, True)),
    ],
)
def test_sampling_params_value_without_effect_is_accepted(field, values):
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value


def test_sampling_params_shorthands_of_vllm_are_resolved():
    params = SamplingParams(seed=-1, logprobs=True, prompt_logprobs=True)
    assert (params.seed, params.logprobs, params.prompt_logprobs) == (None, 1, 1)
    assert [kind.value for kind in RequestOutputKind] == [0, 1, 2]


def test_sampling_params_assigned_value_is_checked_by_check():
    params = SamplingParams(n=2)
    clone = params.clone()
    clone.n = 0
    assert params.n == 2
    with pytest.raises(InvalidRequest, match="`n`"):
        clone.check()


def test_resolve_all_logprobs_replaces_minus_one_alone():
    params = SamplingParams(logprobs=-1, prompt_logprobs=3)
    resolved = resolve_all_logprobs(params, 320)
    assert (resolved.logprobs, resolved.prompt_logprobs, params.logprobs) == (320, 3, -1)
    assert resolve_all_logprobs(resolved, 320) is resolved


def test_sampling_params_from_optional_takes_none_for_the_default():
    params = SamplingParams.from_optional(n=None, temperature=None, top_p=0.5, max_tokens=None, logit_bias={"7": 200})
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (1, 1.0, 0.5, None)
    assert params.logit_bias == {7: 100.0}
    with pytest.raises(InvalidRequest, match="`logit_bias` must have biases by token id"):
        SamplingParams.from_optional(logit_bias={"x": 1})
