"""gpt-oss: its config.json, four-bit weights, and half precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, make_checkpoint
from harness import random_prompt
from keeping_backend import KeepingBackend
from model_runs import load, logits_in_chunks
from oracle import Oracle
from quantized_checkpoints import pack_mxfp4
from ranks import run_ranks, topology
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from eagleray.errors import CheckpointError, ConfigError
from eagleray.kernels.choose import ModelTraits
from eagleray.kernels.params import ClampedSwiglu
from eagleray.kernels.quantized import Mxfp4Weight
from eagleray.kernels.rope_spec import YarnRope
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.models import mxfp4, registry
from eagleray.models.config_file import ConfigFile
from eagleray.models.moe.layout import ExpertOptions
from eagleray.parallel.groups import Groups

ROUNDING = 1e-4
PATH = Path("/somewhere/config.json")


def read(**fields: Any):
    return registry.import_family("GptOssForCausalLM").read_spec(ConfigFile(PATH, fields))


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(seed, length, 384)


def unpack(directory: Path, out: Path) -> Path:
    """Write the same checkpoint with weights as transformers decodes them."""
    tensors = load_file(directory / "model.safetensors")
    for key in [key.removesuffix("_blocks") for key in tensors if key.endswith("_blocks")]:
        blocks, scales = (tensors.pop(f"{key}_{part}") for part in ("blocks", "scales"))
        tensors[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    out.mkdir()
    (out / "config.json").write_text((directory / "config.json").read_text())
    edit_config(out, "quantization_config")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("packed"), "gpt_oss", tokenizer=False)
    pack_mxfp4(directory)
    return directory


# ---- config.json


def test_read_spec_absent_fields_have_defaults():
    spec = read()
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (36, 64, 8, 64)
    assert spec.windows == (128, None) * 18
    assert spec.has_sinks and spec.qkv_bias and spec.output_bias and not spec.qk_norm
    assert isinstance(spec.rope, YarnRope) and (spec.rope.theta, spec.rope.truncate) == (150_000.0, False)
    assert spec.max_model_len == 131_072
    assert (spec.moe.num_experts, spec.moe.top_k, spec.moe.clamp) == (128, 4, ClampedSwiglu(1.702, 7.0))
    assert spec.moe.router.renormalize and all(spec.moe.layers) and not spec.moe.is_mxfp4


def test_read_spec_published_fields_are_read():
    """The fields are those of the published checkpoints."""
    spec = read(
        num_hidden_layers=4,
        num_local_experts=32,
        layer_types=["full_attention", "sliding_attention", "full_attention", "full_attention"],
        sliding_window=64,
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        rope_theta=150_000,
        swiglu_limit=5.0,
        quantization_config={"quant_method": "mxfp4"},
    )
    assert spec.windows == (None, 64, None, None)
    assert (spec.moe.num_experts, spec.moe.clamp.limit, spec.moe.is_mxfp4) == (32, 5.0, True)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "says 'gptq'; .* not supported, but for mxfp4"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "says 'fp8'; .* for mxfp4"),
        ({"quantization_config": {}}, "says None; .* not supported, but for mxfp4"),
        ({"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 100}, "must be multiples of 32"),
        ({"layer_types": ["full_attention"]}, "`layer_types` must be a list of 36"),
        ({"sliding_window": None}, "names sliding_attention, but no window, or"),
        ({"swiglu_limit": 0}, "`swiglu_limit` must be"),
        ({"num_experts_per_tok": 200}, "`num_experts_per_tok`"),
    ],
)
def test_read_spec_invalid_field_is_refused(fields, problem):
    with pytest.raises(CheckpointError, match=problem):
        read(**fields)


# ---- four-bit weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_all_bytes_equal_transformers(dtype):
    """All bytes, with the scales of real models, equal transformers' result, which is transposed."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 16).expand(5, -1, -1, -1).contiguous()
    scales = torch.randint(100, 150, (5, 2, 8), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # [5, 256, 2]
    for matrix, block, scale in zip(expected, blocks, scales, strict=True):
        assert torch.equal(mxfp4.decode(block, scale, dtype), matrix.t())


def test_load_model_mxfp4_equals_decoded_checkpoint(packed, tmp_path):
    plain = unpack(packed, tmp_path / "plain")
    expected = logits_in_chunks(load(plain), prompt(60), 60)
    assert torch.equal(logits_in_chunks(load(packed), prompt(60), 60), expected)
    torch.testing.assert_close(expected, Oracle(plain).logits(prompt(60)), atol=ROUNDING, rtol=1e-5)


@pytest.mark.parametrize("dispatch", [None, "all-reduce", "all-to-all"])
def test_load_model_mxfp4_experts_are_divided(packed, dispatch):
    expected = logits_in_chunks(load(packed), prompt(40), 40)

    def work(groups: Groups) -> torch.Tensor:
        model = load(packed, groups=groups, experts=ExpertOptions(dispatch=dispatch))
        return logits_in_chunks(model, prompt(40), 13)

    torch.testing.assert_close(run_ranks(work, topology(tp=2))[0], expected, atol=ROUNDING, rtol=1e-5)


@pytest.mark.parametrize(
    ("dispatch", "tp_size", "size", "is_kept"),
    [
        (None, 2, 160, True),  # 2 and 3 blocks
        (None, 4, 96, False),  # a rank would have no block
        ("all-to-all", 4, 96, True),
    ],
)
def test_load_model_kept_mxfp4_equals_decoded_weights(dispatch, tp_size, size, is_kept, tmp_path, monkeypatch):
    directory = make_checkpoint(tmp_path, "gpt_oss", tokenizer=False, intermediate_size=size)
    pack_mxfp4(directory)
    made: list[KeepingBackend] = []

    def choose(device: torch.device, model: ModelTraits, *options: Any) -> KeepingBackend:
        made.append(KeepingBackend(model.dtype))
        return made[-1]

    monkeypatch.setattr(registry, "choose_backend", choose)

    def work(groups: Groups) -> torch.Tensor:
        return logits_in_chunks(
            load(directory, groups=groups, experts=ExpertOptions(dispatch=dispatch)), prompt(40), 40
        )

    expected = work(Groups.single())
    assert made[0].count(Mxfp4Weight) == 3 * 2 * 8
    results = run_ranks(work, topology(tp=tp_size))
    assert (made[1].count(Mxfp4Weight) > 0) == is_kept
    torch.testing.assert_close(results[0], expected, atol=ROUNDING, rtol=1e-5)
    monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: TorchBackend())
    assert torch.equal(work(Groups.single()), expected)


def test_load_model_quantization_of_mxfp4_is_refused(packed):
    with pytest.raises(ConfigError, match=r"`quantization`: .*config.json says that the experts are stored as mxfp4"):
        load(packed, quantization="fp8")


def test_load_model_mxfp4_reports_progress(packed):
    size = (packed / "model.safetensors").stat().st_size

    def work(groups: Groups) -> list[tuple[int, int]]:
        reported: list[tuple[int, int]] = []
        options = ExpertOptions(dispatch="all-gather")
        load(packed, groups=groups, experts=options, on_progress=lambda *now: reported.append(now))
        return reported

    for reported in run_ranks(work, topology(tp=2)):
        assert reported == sorted(reported)
        ((total),) = {total for _, total in reported}
        assert 0.4 * size < total < 0.7 * size
        assert 0.8 * total < reported[-2][0] <= total
        assert reported[-1] == (total, total)


def test_load_model_mxfp4_dummy_weights_depend_on_seed(packed):
    first, again, other = (
        logits_in_chunks(load(packed, load_format="dummy", seed=seed), prompt(20), 20) for seed in (1, 1, 2)
    )
    assert first.isfinite().all() and first.std() > 0
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_num_parameters_mxfp4_equals_decoded_checkpoint(packed, tmp_path):
    expected = load(unpack(packed, tmp_path / "plain")).num_parameters
    assert load(packed).num_parameters == load(packed, load_format="dummy").num_parameters == expected


def test_load_model_mxfp4_tensor_of_another_dtype_is_refused(packed, tmp_path):
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name].float()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((packed / "config.json").read_text())))
    with pytest.raises(CheckpointError, match="down_proj_scales' is stored as F32; supported are U8"):
        load(tmp_path)


# ---- half precision; float32 is in test_model_equals_transformers.py


def test_forward_bfloat16_is_as_close_to_float32_as_transformers(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "gpt_oss", tokenizer=False)
    exact = logits_in_chunks(load(checkpoint), prompt(100), 100)
    theirs = Oracle(checkpoint).model.to(torch.bfloat16)
    with torch.inference_mode():
        rounded = theirs(torch.tensor([prompt(100)])).logits[0].float()
    ours = logits_in_chunks(load(checkpoint, dtype="bfloat16"), prompt(100), 100)
    assert (ours - exact).pow(2).mean() < 1.5 * (rounded - exact).pow(2).mean()
