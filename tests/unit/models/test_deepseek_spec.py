"""The config.json of DeepSeek models: meanings, defaults and refusals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from eagleray.errors import CheckpointError
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.models.config_file import ConfigFile
from eagleray.models.registry import import_family
from eagleray.models.spec import ModelSpec

PATH = Path("/somewhere/config.json")


def read(version: int, **fields) -> ModelSpec:
    """Read the spec. `num_experts_per_tok` has no default in V2."""
    needed = {"num_experts_per_tok": 6} if version == 2 else {}
    return import_family(f"DeepseekV{version}ForCausalLM").read_spec(ConfigFile(PATH, needed | fields))


def test_read_spec_absent_fields_have_transformers_defaults():
    v2, v3 = read(2), read(3)
    assert (v2.num_layers, v2.num_heads, v2.vocab_size, v2.max_model_len) == (32, 32, 102_400, 2048)
    assert (v3.num_layers, v3.num_heads, v3.vocab_size, v3.max_model_len) == (61, 128, 129_280, 4096)
    for spec in (v2, v3):
        assert (spec.num_kv_heads, spec.head_dim) == (1, 64)
        assert (spec.mla.q_lora_rank, spec.mla.kv_lora_rank, spec.mla.cached_size) == (1536, 512, 576)
        assert (spec.mla.query_dim, spec.mla.v_head_dim) == (192, 128)
        assert spec.mla.softmax_scale == pytest.approx(192**-0.5)
        assert spec.mla.is_interleaved
    assert (v2.moe.num_experts, v2.moe.shared_intermediate_size, v2.moe.router.num_groups) == (64, 2 * 1407, 1)
    assert (v2.moe.router.scoring, v2.moe.router.renormalize, v2.moe.router.scale, v2.moe.has_correction_bias) == (
        "softmax",
        False,
        1.0,
        False,
    )
    assert all(v2.moe.layers)
    assert (v3.moe.num_experts, v3.moe.top_k, v3.moe.shared_intermediate_size) == (256, 8, 2048)
    assert (v3.moe.router.num_groups, v3.moe.router.top_groups, v3.moe.router.group_score) == (8, 4, "top2")
    assert (v3.moe.router.scoring, v3.moe.router.renormalize, v3.moe.router.scale, v3.moe.has_correction_bias) == (
        "sigmoid",
        True,
        2.5,
        True,
    )
    assert v3.moe.layers == (False,) * 3 + (True,) * 58


@pytest.mark.parametrize("odd", [{}, {"kv_lora_rank": 511}, {"qk_nope_head_dim": 127}, {"v_head_dim": 33}], ids=str)
def test_feature_sizes_with_odd_latents_have_no_native_kernels(odd):
    spec = read(3, **odd)
    assert CpuBackend.serves(torch.bfloat16, feature_sizes=spec.feature_sizes, head_dim=spec.head_dim) == (not odd)


def test_read_spec_null_q_lora_rank_is_none():
    assert read(2, q_lora_rank=None).mla.q_lora_rank is None


def test_read_spec_groups_count_only_for_grouped_methods():
    groups = {"n_group": 8, "topk_group": 3}
    greedy, grouped = read(2, **groups), read(2, **groups, topk_method="group_limited_greedy")
    assert (greedy.moe.router.num_groups, greedy.moe.router.top_groups) == (1, 1)
    assert (grouped.moe.router.num_groups, grouped.moe.router.top_groups, grouped.moe.router.group_score) == (
        8,
        3,
        "max",
    )


def test_read_spec_null_shared_experts_is_zero():
    assert read(3, n_shared_experts=None).moe.shared_intermediate_size == 0


def test_read_spec_yarn_scales_the_softmax():
    """The values are those of DeepSeek-V2-Lite and of DeepSeek-V3."""
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    for scale in (0.707, 1.0):
        spec = read(3, rope_scaling=yarn | {"mscale": scale, "mscale_all_dim": scale})
        factor = 0.1 * scale * math.log(40) + 1
        assert spec.mla.softmax_scale == pytest.approx(192**-0.5 * factor * factor)
        assert spec.rope.attention_factor == 1.0
        assert spec.max_model_len == 163_840
    assert read(3, rope_scaling=yarn).mla.softmax_scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize(
    ("version", "fields", "expected"),
    [
        (2, {"scoring_func": "sigmoid"}, "`scoring_func` 'sigmoid' is not supported; supported is softmax"),
        (3, {"scoring_func": "softmax"}, "`scoring_func` 'softmax' is not supported; supported is sigmoid"),
        (2, {"topk_method": "noaux_tc"}, "`topk_method` 'noaux_tc' is not supported; supported are greedy and group_"),
        (3, {"topk_method": "greedy"}, "`topk_method` 'greedy' is not supported; supported is noaux_tc"),
        (2, {"norm_topk_prob": True}, "`norm_topk_prob` is true, which is not supported for DeepseekV2ForCausalLM"),
        (2, {"topk_method": "group_limited_greedy"}, "`n_group` must be an integer of at least 1, but it is None"),
        (2, {"num_experts_per_tok": None}, "`num_experts_per_tok` must be an integer of at least 1, but it is None"),
        (3, {"moe_layer_freq": 2}, "`moe_layer_freq` 2 is not supported; supported is 1"),
        (3, {"n_group": 7}, "`n_routed_experts` 256 must be a multiple of `n_group` 7"),
        (3, {"n_group": 256}, "`n_group` 256 leaves a group of one expert; a group's score takes two"),
        (3, {"topk_group": 9}, "`topk_group` must be at most `n_group` 8, but it is 9"),
        (3, {"topk_group": 1, "num_experts_per_tok": 33}, "`num_experts_per_tok` must be at most 32"),
        (2, {"num_experts_per_tok": 65}, "`num_experts_per_tok` must be at most 64"),
        (3, {"qk_rope_head_dim": 7}, "`qk_rope_head_dim` must be even, to be rotated, but it is 7"),
        (
            3,
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "not supported, but for fp8",
        ),
        (3, {"hidden_act": "gelu"}, "`hidden_act` 'gelu' is not supported; supported is silu"),
    ],
)
def test_read_spec_unsupported_field_is_refused(version, fields, expected):
    with pytest.raises(CheckpointError) as error:
        read(version, **fields)
    assert str(error.value).startswith(f"{PATH}: ")
    assert expected in str(error.value)
