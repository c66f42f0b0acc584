"""The fields of config.json: both styles, defaults and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleray.errors import CheckpointError
from eagleray.kernels.rope import Rope
from eagleray.kernels.rope_spec import DefaultRope, DynamicRope, LinearRope, Llama3Rope, YarnRope
from eagleray.models.config_file import ConfigFile
from eagleray.models.registry import MODULES, import_family
from eagleray.models.size import num_parameters

PATH = Path("/somewhere/config.json")


def read(architecture: str = "LlamaForCausalLM", **fields):
    return import_family(architecture).read_spec(ConfigFile(PATH, fields))


def refusal(architecture: str = "LlamaForCausalLM", **fields) -> str:
    with pytest.raises(CheckpointError) as error:
        read(architecture, **fields)
    assert str(error.value).startswith(f"{PATH}: ")
    return str(error.value)


def test_read_spec_absent_fields_have_transformers_defaults():
    names = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
    llama, mistral, mixtral = map(read, names)
    assert (llama.num_layers, llama.num_kv_heads, llama.head_dim, llama.max_model_len) == (32, 32, 128, 2048)
    assert llama.rope == DefaultRope(10_000.0)
    assert (llama.norm_eps, llama.tie_embeddings, llama.dtype) == (1e-6, False, None)
    assert not (llama.qkv_bias or llama.output_bias or llama.mlp_bias or llama.qk_norm)
    assert (mistral.num_kv_heads, mistral.max_model_len, set(mistral.windows)) == (8, 131_072, {4096})
    assert (mixtral.norm_eps, mixtral.rope, set(mixtral.windows)) == (1e-5, DefaultRope(1e6), {None})
    assert (mixtral.moe.num_experts, mixtral.moe.top_k, mixtral.moe.intermediate_size) == (8, 2, 14336)
    qwen3, qwen3_moe = read("Qwen3ForCausalLM"), read("Qwen3MoeForCausalLM")
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, set(qwen3.windows)) == (128, True, False, {None})
    assert (qwen3_moe.head_dim, qwen3_moe.moe.num_experts, qwen3_moe.moe.top_k) == (64, 128, 8)
    assert not qwen3_moe.moe.router.renormalize
    assert all(qwen3_moe.moe.layers)
    qwen2 = read("Qwen2ForCausalLM")
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)


def test_read_spec_null_kv_heads_equal_heads():
    assert read("MistralForCausalLM", num_key_value_heads=None).num_kv_heads == 32


def test_read_spec_both_names_of_num_experts_are_read():
    assert read("Qwen3MoeForCausalLM", num_experts=16).moe.num_experts == 16
    assert read("Qwen3MoeForCausalLM", num_local_experts=16).moe.num_experts == 16


def test_read_spec_both_names_of_dtype_are_read():
    assert read(dtype="bfloat16").dtype == read(torch_dtype="bfloat16").dtype == "bfloat16"
    assert read(torch_dtype="torch.float16").dtype == "float16"


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("kind_field", ["type", "rope_type"])
def test_read_spec_both_styles_of_rope_are_read(kind_field):
    for kind, fields in (("linear", {"factor": 2.0}), ("dynamic", {"factor": 2.0}), ("llama3", LLAMA3), ("yarn", YARN)):
        old = read(rope_theta=5e5, rope_scaling={kind_field: kind} | fields)
        new = read(rope_parameters={"rope_theta": 5e5, "rope_type": kind} | fields)
        assert old == new
        assert old.rope.theta == 5e5
    assert read(rope_theta=5e5, rope_scaling=None).rope == DefaultRope(5e5)
    assert read(rope_theta=5e5, rope_scaling={kind_field: "default"}).rope == DefaultRope(5e5)


def test_read_spec_max_model_len_includes_rope_scaling():
    positions = {"max_position_embeddings": 40960}
    assert read(**positions).max_model_len == 40960
    for kind in ("linear", "dynamic"):
        assert read(**positions, rope_scaling={"type": kind, "factor": 2.5}).max_model_len == 102_400
    assert read(**positions, rope_scaling={"rope_type": "llama3"} | LLAMA3).max_model_len == 40960
    assert read(**positions, rope_scaling={"rope_type": "yarn"} | YARN).max_model_len == 131_072
    assert read(**positions, rope_scaling={"rope_type": "yarn", "factor": 2.0}).max_model_len == 81_920


def test_read_spec_rope_type_gives_its_rope():
    assert read(rope_scaling={"type": "linear", "factor": 2}).rope == LinearRope(1e4, 2.0)
    assert read(rope_scaling={"type": "dynamic", "factor": 2}).rope == DynamicRope(1e4, 2.0, 2048)
    assert read(rope_scaling={"type": "llama3"} | LLAMA3).rope == Llama3Rope(1e4, 8.0, 1.0, 4.0, 8192)
    yarn = read(rope_scaling={"type": "yarn", "attention_factor": 1.5, "truncate": False} | YARN).rope
    assert yarn == YarnRope(1e4, 4.0, 32768, 1.5, 32.0, 1.0, False)
    # the field outside of the rope's own object has priority, and can replace the factor
    outside = read(
        max_position_embeddings=4096, original_max_position_embeddings=1024, rope_scaling={"type": "yarn"} | YARN
    )
    assert outside.rope.original_max == 1024
    alone = read(max_position_embeddings=4096, original_max_position_embeddings=1024, rope_scaling={"type": "yarn"})
    assert alone.rope.factor == 4.0


def test_read_spec_windows_by_layer():
    assert read("MistralForCausalLM", num_hidden_layers=2, sliding_window=None).windows == (None, None)
    assert read("MixtralForCausalLM", num_hidden_layers=2, sliding_window=7).windows == (7, 7)
    sliding = {"num_hidden_layers": 3, "sliding_window": 7, "use_sliding_window": True}
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert read(name, **sliding, max_window_layers=2).windows == (None, None, 7)
        assert read(name, **sliding | {"use_sliding_window": False}, max_window_layers=0).windows == (None,) * 3
        kinds = ["full_attention", "sliding_attention", "full_attention"]
        assert read(name, **sliding, layer_types=kinds).windows == (None, 7, None)
    assert read("Qwen3MoeForCausalLM", **sliding).windows == (7, 7, 7)


def test_read_spec_moe_layers_by_step_and_exceptions():
    layers = read("Qwen3MoeForCausalLM", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]).moe.layers
    assert layers == (False, True, False, False, False, True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hidden_act": "gelu"}, "`hidden_act` 'gelu' is not supported; supported is silu"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "not supported, but for fp8",
        ),
        ({"hidden_size": "64"}, "`hidden_size` must be an integer of at least 1, but it is '64'"),
        ({"hidden_size": 0}, "`hidden_size` must be an integer of at least 1, but it is 0"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` must be an integer of at least 1, but it is True"),
        ({"rms_norm_eps": -1.0}, "`rms_norm_eps` must be a positive number, but it is -1.0"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` must be true or false, but it is 'yes'"),
        ({"num_key_value_heads": 5}, "`num_attention_heads` 32 must be a multiple of `num_key_value_heads` 5"),
        ({"head_dim": 63}, "the head size must be even, to be rotated, but it is 63"),
        ({"dtype": "float8_e4m3fn"}, "`dtype` 'float8_e4m3fn' is not supported; supported are bfloat16"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2}},
            "the rope type 'longrope' is not supported; supported are default, linear, dynamic, llama3 and yarn",
        ),
        ({"rope_scaling": {"type": "linear"}}, "`factor` must be a positive number, but it is None"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "`factor` must be a positive number, but it is '4'"),
        ({"rope_scaling": "yarn"}, "`rope_scaling` must be an object, but it is 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between kinds of layers"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5"),
    ],
)
def test_read_spec_unsupported_field_is_refused(fields, expected):
    assert expected in refusal(**fields)


def test_read_spec_invalid_layer_types_are_refused():
    name = "Qwen3ForCausalLM"
    assert "`layer_types` must be a list of 2" in refusal(name, num_hidden_layers=2, layer_types=["full_attention"])
    assert "the layer type 'linear_attention' is not supported" in refusal(
        name, num_hidden_layers=1, layer_types=["linear_attention"]
    )
    assert "`use_sliding_window` is not set" in refusal(name, num_hidden_layers=1, layer_types=["sliding_attention"])


def test_read_spec_more_experts_per_token_than_experts_is_refused():
    expected = "`num_experts_per_tok` must be at most 4, but it is 5"
    assert expected in refusal("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=5)
    assert expected in refusal("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=5)


# Values that no model has.

ABSURD = [
    ("LlamaForCausalLM", {"hidden_size": 2**40}, "`hidden_size` must be at most 16777216, but it is 1099511627776"),
    ("LlamaForCausalLM", {"num_hidden_layers": 10**9}, "`num_hidden_layers` must be at most 8192"),
    ("Qwen3MoeForCausalLM", {"num_experts": 10**9}, "`num_experts` must be at most 32768, but it is 1000000000"),
    ("MixtralForCausalLM", {"num_local_experts": 10**9}, "`num_local_experts` must be at most 32768"),
    ("DeepseekV3ForCausalLM", {"n_routed_experts": 10**9}, "`n_routed_experts` must be at most 32768"),
    ("LlamaForCausalLM", {"vocab_size": 2**60}, "`vocab_size` must be at most"),
    ("LlamaForCausalLM", {"hidden_size": 10**4000}, "`hidden_size` must be at most"),
    ("LlamaForCausalLM", {"max_position_embeddings": 2**40}, "`max_position_embeddings` must be at most 2147483647"),
    ("LlamaForCausalLM", {"rope_theta": float("inf")}, "`rope_theta` must be above 1 and at most 1e+30, but it is inf"),
    ("LlamaForCausalLM", {"rope_theta": float("nan")}, "`rope_theta` must be a positive number, but it is nan"),
    ("LlamaForCausalLM", {"rope_theta": 10**400}, "`rope_theta` must be above 1 and at most 1e+30"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 1e300}}, "`factor` must be above 1e-06"),
    (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "linear", "factor": 1e6}, "max_position_embeddings": 10**6},
        "length",
    ),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 1e-5}}, "make a length of 0 tokens"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "llama3"} | LLAMA3 | {"high_freq_factor": 1}}, "must be above"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "at least 4 features"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0.5}}, "above 0.999"),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [[]]}, "`mlp_only_layers` must be a list of layer numbers"),
    ("Qwen3ForCausalLM", {"layer_types": ["x" * 10**6]}, "`layer_types` must be a list of 32"),
]


@pytest.mark.parametrize(("architecture", "fields", "expected"), ABSURD)
def test_read_spec_absurd_number_is_refused_briefly(architecture, fields, expected):
    message = refusal(architecture, **fields)
    assert expected in message
    assert len(message) < 400


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"hidden_size": 1' + "0" * 5000 + "}",
        "\xff",
        "",
        "[]",
        '{"a": "' + "x" * 2**25,
    ],
)
def test_read_config_nonsense_is_refused_briefly(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as caught:
        ConfigFile.read(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")
    assert len(str(caught.value)) < 300


VALUES = st.one_of(
    st.sampled_from(
        [0, -1, 1, 2, 3, 2**31, 2**63, 10**400, 0.5, 1e300, 1e-300, float("inf"), float("nan"), True, None]
    ),
    st.text(max_size=3),
    st.lists(st.integers(-1, 9), max_size=3),
    st.just({}),
    st.just([[]]),
)
FIELDS = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "max_window_layers",
    "quantization_config",
    "attention_bias",
    "mlp_bias",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "n_routed_experts",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "moe_layer_freq",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_nextn_predict_layers",
    "rope_interleave",
    "swiglu_alpha",
    "swiglu_limit",
]
ROPE_FIELDS = [
    "rope_type",
    "type",
    "factor",
    "rope_theta",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "partial_rotary_factor",
]
ROPES = st.dictionaries(
    st.sampled_from(ROPE_FIELDS),
    st.one_of(VALUES, st.sampled_from(["yarn", "llama3", "linear", "dynamic"])),
    max_size=6,
)


@settings(max_examples=400, deadline=None)
@given(
    architecture=st.sampled_from(sorted(MODULES)),
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    rope=st.one_of(st.none(), ROPES),
)
def test_read_spec_any_config_is_a_model_or_refused(architecture, fields, rope):
    fields = fields if rope is None else fields | {"rope_scaling": rope}
    try:
        spec = import_family(architecture).read_spec(ConfigFile(PATH, fields))
    except CheckpointError as error:
        assert len(str(error)) < 500
        return
    Rope(spec.rope, spec.head_dim, dtype=torch.float32, device=torch.device("cpu")).table(torch.arange(3))
    assert 1 <= spec.max_model_len < 2**31
    assert num_parameters(spec) > 0
