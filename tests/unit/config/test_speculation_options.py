"""`speculative_config`: fields, defaults and refusals."""

from __future__ import annotations

import pytest

from eagleray.config.build import build_config
from eagleray.config.speculation import speculation
from eagleray.config.vllm_options import translate
from eagleray.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_speculation_lookup_limits_default_as_in_vllm(given, expected):
    options = speculation({"method": "ngram", "num_speculative_tokens": "5", **given})
    assert (options.prompt_lookup_min, options.prompt_lookup_max) == expected
    assert options.num_speculative_tokens == 5


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"num_speculative_tokens": 5}, "`method` is missing; it must be ngram, suffix, draft_model or mtp"),
        ({"method": "eagle3", "num_speculative_tokens": 5}, "`method` is 'eagle3', which is not supported"),
        ({"method": "ngram"}, "`num_speculative_tokens` must be a number from 1 to 64, but it is None"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "must be a number from 1 to 64"),
        ({"method": "ngram", "prompt_lookup_mx": 3}, "no field `prompt_lookup_mx`; did you mean `prompt_lookup_max`?"),
        ({"method": "ngram", "model": "/draft"}, "`model` is no field of the method ngram"),
        ({"method": "ngram", "draft": 1}, "there is no field `draft`; there are method, num_speculative_tokens"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "draft_model needs `model`, the directory or the id"),
        ({"method": "mtp", "model": "/m", "num_speculative_tokens": 1}, "`model` is no field of the method mtp"),
        ({"method": "mtp", "quantization": "int8"}, "`quantization` is no field of the method mtp"),
        ({"model": "/draft", "num_speculative_tokens": 3, "quantization": "int2"}, "Invalid enum value 'int2'"),
        ({"method": "draft_model", "model": "/draft"}, "`num_speculative_tokens` must be a number from 1 to 64"),
        (
            {"model": "/draft", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
            "`prompt_lookup_max` is no field of the method draft_model",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 3, "prompt_lookup_max": 2},
            "at most `prompt_lookup_max`, but they are 3 and 2",
        ),
        ({"method": "ngram", "num_speculative_tokens": "x"}, "option `speculative_config`: "),
        ({"method": "suffix", "num_speculative_tokens": 65}, "must be a number from 1 to 64, but it is 65"),
        ({"method": "suffix", "prompt_lookup_max": 4}, "`prompt_lookup_max` is no field of the method suffix"),
        (
            {"method": "ngram", "num_speculative_tokens": 5, "suffix_decoding_max_tree_depth": 9},
            "`suffix_decoding_max_tree_depth` is no field of the method ngram",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_depth": 9},
            "no field `suffix_decoding_max_depth`; did you mean `suffix_decoding_max_tree_depth`?",
        ),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "must be at least 1, but it is 0"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "must be at least 0, but it is -1"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": -1}, "must be a number from 0, but it is -1"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "must be a number from 0 to 1, but it is 2"),
    ],
)
def test_speculation_wrong_fields_are_refused(given, reason):
    with pytest.raises(ConfigError) as error:
        build_config(speculative_config=given)
    assert reason in str(error.value)


def test_speculation_suffix_fields_default_as_in_vllm():
    options = speculation({"method": "suffix"})
    assert options.num_speculative_tokens == options.suffix_decoding_max_tree_depth == 24
    assert options.suffix_decoding_max_cached_requests == 10_000
    assert (options.suffix_decoding_max_spec_factor, options.suffix_decoding_min_token_prob) == (1.0, 0.1)
    given = {"suffix_decoding_max_tree_depth": 99, "suffix_decoding_max_cached_requests": "0"}
    options = speculation({"method": "suffix", **given})
    assert (options.num_speculative_tokens, options.suffix_decoding_max_cached_requests) == (64, 0)


def test_speculation_flags_of_single_fields_are_one_option():
    own = {"speculative_config"}
    given = {"spec_method": "ngram", "spec_tokens": 3}
    assert translate(given, own).options == {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    with pytest.raises(ConfigError, match="`spec_method`: it is a field of `speculative_config`, which is given too"):
        translate(given | {"speculative_config": "{}"}, own)
    expected = {"model": "/draft", "num_speculative_tokens": 3}
    assert translate({"spec_model": "/draft", "spec_tokens": 3}, own).options == {"speculative_config": expected}


def test_speculation_model_without_method_is_a_draft_model():
    options = {"model": "/draft", "num_speculative_tokens": "3"}
    drafts = speculation(options)
    assert (drafts.method, drafts.model, drafts.num_speculative_tokens) == ("draft_model", "/draft", 3)
    layer = speculation({"method": "deepseek_mtp"})
    assert (layer.method, layer.num_speculative_tokens) == ("mtp", 1)
