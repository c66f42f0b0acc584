"""The number of parameters of published models and of transformers' small ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import FAMILIES as SMALL
from checkpoints import make_checkpoint

from eagleray.kernels.quantized import WeightFormat
from eagleray.models.checkpoint_files import read_headers
from eagleray.models.config_file import ConfigFile
from eagleray.models.registry import find_family, import_family
from eagleray.models.size import num_parameters, weight_bytes
from eagleray.parallel.mesh import Mesh

DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "n_routed_experts": 256,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}
KIMI_K2 = DEEPSEEK_V3 | {
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
}
GPT_OSS_120B = {"num_hidden_layers": 36, "quantization_config": {"quant_method": "mxfp4"}}
LLAMA_405B = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN3_235B = {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "head_dim": 128,
    "num_experts": 128,
    "moe_intermediate_size": 1536,
    "rope_theta": 5000000.0,
}
QWEN25_1M = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 1010000,
    "rope_theta": 10000000.0,
    "sliding_window": 32768,
}
LARGE_VOCABULARY = {"hidden_size": 2048, "vocab_size": 262208, "max_position_embeddings": 10_485_760}

PUBLISHED = [
    ("DeepseekV3ForCausalLM", DEEPSEEK_V3, 671e9),
    ("DeepseekV3ForCausalLM", KIMI_K2, 1.026e12),
    ("GptOssForCausalLM", GPT_OSS_120B, 116.8e9),
    ("LlamaForCausalLM", LLAMA_405B, 405.8e9),
    ("Qwen3MoeForCausalLM", QWEN3_235B, 235.1e9),
    ("Qwen2ForCausalLM", QWEN25_1M, 7.6e9),
    ("LlamaForCausalLM", LARGE_VOCABULARY, None),
]


@pytest.mark.parametrize(("architecture", "fields", "expected"), PUBLISHED)
def test_num_parameters_published_model_has_published_size(architecture, fields, expected):
    spec = import_family(architecture).read_spec(ConfigFile(Path("config.json"), fields))
    assert spec.num_layers > 0
    if expected is not None:
        assert 0.98 * expected < num_parameters(spec) < 1.005 * expected


@pytest.mark.parametrize("family", SMALL)
def test_num_parameters_is_slightly_below_stored_parameters(family, tmp_path):
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False)
    config = ConfigFile.read(checkpoint)
    spec = find_family(config).read_spec(config)
    stored, names = read_headers(checkpoint)
    assert {int(name.split(".")[2]) for name in names if ".layers." in name} == set(range(spec.num_layers))
    assert 0.9 * stored < num_parameters(spec) <= stored


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_weight_bytes_of_all_workers_add_up_to_the_model(family, tmp_path):
    config = ConfigFile.read(make_checkpoint(tmp_path, family, tokenizer=False))
    spec = find_family(config).read_spec(config)
    alone = weight_bytes(spec, itemsize=2, mesh=Mesh(), num_expert_ranks=1)
    assert alone == 2 * num_parameters(spec)
    meshes = [Mesh(rank=rank, tp_size=2, pp_size=3) for rank in range(6)]
    parts = [weight_bytes(spec, itemsize=2, mesh=mesh, num_expert_ranks=2) for mesh in meshes]
    twice = 2 * spec.tie_embeddings * spec.vocab_size * spec.hidden_size  # first and last stage each have it
    assert sum(parts) == alone + twice


@pytest.mark.parametrize(
    ("architecture", "fields", "kept", "expected"),
    [
        ("DeepseekV3ForCausalLM", DEEPSEEK_V3, WeightFormat.FP8, 671e9 + 129_280 * 7168 * 2),
        ("DeepseekV3ForCausalLM", DEEPSEEK_V3, None, 2 * 671e9),
        ("GptOssForCausalLM", GPT_OSS_120B, WeightFormat.MXFP4, 114.7e9 / 2 + 2.1e9 * 2),
        ("GptOssForCausalLM", GPT_OSS_120B, None, 2 * 116.8e9),
    ],
)
def test_weight_bytes_are_those_of_the_kept_format(architecture, fields, kept, expected):
    spec = import_family(architecture).read_spec(ConfigFile(Path("config.json"), fields))
    found = weight_bytes(spec, itemsize=2, kept=kept, mesh=Mesh(), num_expert_ranks=1)
    assert 0.98 * expected < found < 1.005 * expected
