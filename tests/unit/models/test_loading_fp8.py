"""FP8 weights with a scale for each block, as DeepSeek-V3 and others are published: they equal their dequantized
numbers, however they are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import edit_config, make_checkpoint
from harness import random_prompt
from hypothesis import given
from hypothesis import strategies as st
from model_runs import load, logits_in_chunks
from ranks import run_ranks, topology
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagleray.errors import CheckpointError
from eagleray.models.loading import CheckpointWeights
from eagleray.models.moe.layout import ExpertOptions
from eagleray.models.weights import Cut
from eagleray.parallel.groups import Groups

BLOCK = (24, 40)
"""A block size of which no size of the model is a multiple."""
PLAIN = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
PROMPT = random_prompt(0, 40, 384)


def of_blocks(weight: Tensor, block: tuple[int, int]) -> list[tuple[slice, slice]]:
    rows, columns = (range(0, size, step) for size, step in zip(weight.shape, block, strict=True))
    return [(slice(i, i + block[0]), slice(j, j + block[1])) for i in rows for j in columns]


def quantize(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight in FP8, its scales, and the dequantized weight."""
    scales = torch.empty([-(-size // step) for size, step in zip(weight.shape, block, strict=True)])
    small, large = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for number, place in enumerate(of_blocks(weight, block)):
        scale = weight[place].abs().max() / 448
        scales.view(-1)[number] = scale
        small[place] = (weight[place] / scale).to(torch.float8_e4m3fn)
        large[place] = small[place].float() * scale
    return small, scales, large


def quantized(directory: Path, family: str, out: Path) -> tuple[Path, Path]:
    """Write a checkpoint in FP8 and its dequantized twin."""
    plain = make_checkpoint(directory, family, tokenizer=False)
    tensors = load_file(plain / "model.safetensors")
    small = dict(tensors)
    for name, weight in tensors.items():
        if weight.dim() == 2 and not name.endswith(PLAIN):
            small[name], small[f"{name}_scale_inv"], tensors[name] = quantize(weight, BLOCK)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    out.mkdir()
    (out / "config.json").write_text((plain / "config.json").read_text())
    edit_config(out, quantization_config={"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3"})
    save_file(small, out / "model.safetensors", metadata={"format": "pt"})
    return out, plain


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_load_model_fp8_equals_dequantized_checkpoint(family, tmp_path):
    small, plain = quantized(tmp_path / "plain", family, tmp_path / "small")
    reported: list[tuple[int, int]] = []
    model, whole = load(small, on_progress=lambda *now: reported.append(now)), load(plain)
    expected = logits_in_chunks(whole, PROMPT, 40)
    assert torch.equal(logits_in_chunks(model, PROMPT, 40), expected)
    assert model.num_parameters == whole.num_parameters
    assert 0.9 * reported[-1][1] < reported[-2][0] <= reported[-1][1]

    def work(groups: Groups) -> list[Tensor]:
        options = ExpertOptions(dispatch=None if family == "llama" else "all-to-all")
        return [
            logits_in_chunks(load(small, groups=groups, experts=each), PROMPT, 13)
            for each in (NO_EXPERT_PARALLELISM, options)
        ]

    for logits in run_ranks(work, topology(tp=2))[0]:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


NO_EXPERT_PARALLELISM = ExpertOptions()


@given(data=st.data(), shape=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_load_part_of_fp8_weight_equals_dequantized_part(data, shape, tmp_path_factory):
    block = data.draw(st.tuples(st.integers(1, 50), st.integers(1, 50)))
    small, scales, expected = quantize(torch.randn(shape) + 3, block)
    directory = tmp_path_factory.mktemp("weight")
    save_file({"a": small, "a_scale_inv": scales}, directory / "model.safetensors")
    dim = data.draw(st.integers(0, 1))
    first = data.draw(st.integers(0, shape[dim]))
    span = range(first, data.draw(st.integers(first, shape[dim])))
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "on_progress": None}
    with CheckpointWeights(directory, **options, fp8_block=block) as weights:
        assert torch.equal(weights.load("a", shape), expected)
        part = weights.load("a", shape, Cut(dim, span))
        assert torch.equal(part, expected[span.start : span.stop] if dim == 0 else expected[:, span.start : span.stop])


def test_load_model_wrong_scales_are_refused(tmp_path):
    small, _ = quantized(tmp_path / "plain", "llama", tmp_path / "small")
    tensors = load_file(small / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    scales = tensors.pop(name)
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale_inv' of shape \[4, 2\] is missing"):
        load(small)
    save_file(tensors | {name: scales[:1].clone()}, small / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has the shape \[1, 2\], but config.json implies \[4, 2\]"):
        load(small)
    save_file(tensors | {name: scales}, small / "model.safetensors", metadata={"format": "pt"})
    edit_config(small, "quantization_config")
    with pytest.raises(CheckpointError, match="is stored as F8_E4M3; supported are F32, F16, BF16"):
        load(small)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"quant_method": "fp8"}, "`weight_block_size` must be two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "`weight_block_size` must be two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "`weight_block_size` must be two sizes"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "`activation_scheme` 'static' is not supported"),
        ({"quant_method": "awq"}, "says 'awq'; .* not supported, but for fp8"),
        ({"quant_method": "mxfp4"}, "says 'mxfp4'; .* not supported, but for fp8"),
        ({}, "says None; .* not supported, but for fp8"),
        ({"bits": 4}, "says None; .* not supported, but for fp8"),
        ("gptq", "says 'gptq'; .* not supported, but for fp8"),
    ],
)
def test_load_model_unsupported_quantization_is_refused(fields, problem, tmp_path):
    plain = make_checkpoint(tmp_path, "llama", tokenizer=False)
    edit_config(plain, quantization_config=fields)
    with pytest.raises(CheckpointError, match=problem):
        load(plain)
