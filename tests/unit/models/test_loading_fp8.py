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
from keeping_backend import KeepingBackend
from model_runs import load, logits_in_chunks
from quantized_checkpoints import quantize_blocks, write_fp8_checkpoint
from ranks import run_ranks, topology
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagleray.errors import CheckpointError, ConfigError
from eagleray.kernels.choose import ModelTraits
from eagleray.kernels.quantized import Fp8Weight, WeightFormat
from eagleray.models import registry
from eagleray.models.loading import CheckpointWeights
from eagleray.models.moe.layout import ExpertOptions
from eagleray.models.stored_weights import WeightRules
from eagleray.models.weights import Cut, Param
from eagleray.parallel.groups import Groups

BLOCK = (24, 40)
"""A block size of which no size of the model is a multiple."""
PROMPT = random_prompt(0, 40, 384)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_load_model_fp8_equals_dequantized_checkpoint(family, tmp_path):
    small, plain = write_fp8_checkpoint(tmp_path / "plain", family, tmp_path / "small", BLOCK)
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
    small, scales, expected = quantize_blocks(torch.randn(shape) + 3, block)
    directory = tmp_path_factory.mktemp("weight")
    save_file({"a": small, "a_scale_inv": scales}, directory / "model.safetensors")
    dim = data.draw(st.integers(0, 1))
    first = data.draw(st.integers(0, shape[dim]))
    span = range(first, data.draw(st.integers(first, shape[dim])))
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    with CheckpointWeights(directory, WeightRules(**options, fp8_block=block)) as weights:
        assert torch.equal(weights.load(Param("a", shape)), expected)
        part = weights.load(Param("a", shape, Cut(dim, span)))
        assert torch.equal(part, expected[span.start : span.stop] if dim == 0 else expected[:, span.start : span.stop])


# ---- weights that stay in FP8


@pytest.fixture
def backends(monkeypatch):
    """The backends of the models that the test has loaded."""
    made: list[KeepingBackend] = []

    def choose(device: torch.device, model: ModelTraits, *options: object) -> KeepingBackend:
        made.append(KeepingBackend(model.dtype))
        return made[-1]

    monkeypatch.setattr(registry, "choose_backend", choose)
    return made


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_load_model_kept_fp8_equals_dequantized_checkpoint(family, backends, tmp_path):
    fields = {} if family == "deepseek_v3" else {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    block = (24, 128)  # groups of layers and ranks cut blocks of rows
    small, plain = write_fp8_checkpoint(tmp_path / "plain", family, tmp_path / "small", block, **fields)

    def logits(directory: Path, groups: Groups, dispatch: str | None) -> tuple[Tensor, int]:
        model = load(directory, dtype="bfloat16", groups=groups, experts=ExpertOptions(dispatch=dispatch))
        return logits_in_chunks(model, PROMPT, 13), model.num_parameters

    for dispatch in (None,) if family == "llama" else (None, "all-to-all"):

        def work(groups: Groups, dispatch: str | None = dispatch) -> list[tuple[Tensor, int]]:
            return [logits(directory, groups, dispatch) for directory in (small, plain)]

        for (kept, num_kept), (decoded, num_decoded) in run_ranks(work, topology(tp=2)):
            assert torch.equal(kept, decoded) and num_kept == num_decoded
    kept, decoded = (logits(directory, Groups.single(), None)[0] for directory in (small, plain))
    assert torch.equal(kept, decoded)
    plain_ones = 4 if family == "qwen3_moe" else 1  # head and routers
    assert backends[-2].count(Fp8Weight) == backends[-1].count(Tensor) - plain_ones
    assert backends[-1].count(Fp8Weight) == 0


@given(data=st.data(), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3), columns=st.integers(1, 400))
def test_load_weight_fp8_equals_dequantized_parts(data, sizes, columns, tmp_path_factory):
    block = data.draw(st.sampled_from([(16, 128), (7, 256), (1, 400), (50, 128)]))
    directory, names = tmp_path_factory.mktemp("weight"), [str(index) for index in range(len(sizes))]
    shapes = [(rows, columns) for rows in sizes]
    tensors = {}
    for name, shape in zip(names, shapes, strict=True):
        tensors[name], tensors[f"{name}_scale_inv"], _ = quantize_blocks(torch.randn(shape) + 3, block)
    save_file(tensors, directory / "model.safetensors")
    if data.draw(st.booleans()):
        spans = [sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows)))) for rows in sizes]
        cuts = [Cut(0, range(first, last)) for first, last in spans]
    else:
        first = data.draw(st.sampled_from([column for column in (0, 128, 200, 256, 300) if column < columns]))
        cuts = [Cut(1, range(first, data.draw(st.integers(first + 1, columns))))] * len(sizes)
    options = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "fp8_block": block}
    with (
        CheckpointWeights(directory, WeightRules(**options)) as decoding,
        CheckpointWeights(directory, WeightRules(**options, kept_formats=frozenset({WeightFormat.FP8}))) as keeping,
    ):
        params = [Param(*one) for one in zip(names, shapes, cuts, strict=True)]
        expected = decoding.load_weight(params)
        found = keeping.load_weight(params)
    span = cuts[0].span if cuts[0].dim == 1 else range(columns)
    is_aligned = span.start % block[1] == 0 or span.start // block[1] == (span.stop - 1) // block[1]
    assert isinstance(expected, Tensor) and isinstance(found, Fp8Weight) == is_aligned
    if isinstance(found, Fp8Weight):
        assert found.block[1] == block[1] and block[0] % found.block[0] == 0
        found = found.dequantize(torch.bfloat16)
    assert torch.equal(found, expected)


def test_load_weight_fp8_whole_blocks_stay_as_stored(tmp_path):
    small, scales, _ = quantize_blocks(torch.randn(512, 256), (128, 128))
    save_file({"a": small, "a_scale_inv": scales}, tmp_path / "model.safetensors")
    options = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "fp8_block": (128, 128)}
    with CheckpointWeights(tmp_path, WeightRules(**options, kept_formats=frozenset({WeightFormat.FP8}))) as weights:
        cuts = [Cut(0, range(128, 384)), Cut(0, range(384, 512))]
        found = weights.load_weight([Param("a", (512, 256), cut) for cut in cuts])
    assert isinstance(found, Fp8Weight) and found.block == (128, 128)
    assert torch.equal(found.scales, scales[1:])
    assert torch.equal(found.values.view(torch.uint8), small[128:].view(torch.uint8))


def test_load_weight_fp8_cut_within_blocks_of_columns_warns_once(tmp_path, caplog):
    small, scales, expected = quantize_blocks(torch.randn(8, 256), (8, 128))
    save_file({"a": small, "a_scale_inv": scales}, tmp_path / "model.safetensors")
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "fp8_block": (8, 128)}
    with CheckpointWeights(tmp_path, WeightRules(**options, kept_formats=frozenset({WeightFormat.FP8}))) as weights:
        for _ in range(2):
            assert torch.equal(weights.load_weight([Param("a", (8, 256), Cut(1, range(64, 256)))]), expected[:, 64:])
    (message,) = caplog.messages
    assert "a and others are decoded" in message and "columns 64 to 255" in message


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_load_model_quantization_makes_linear_layers_fp8(family, load_format, backends, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # layers are loaded in order
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False)
    plain = load(checkpoint, load_format=load_format)
    model = load(checkpoint, load_format=load_format, quantization="fp8")
    assert model.num_parameters == plain.num_parameters
    assert logits_in_chunks(model, PROMPT, 40).isfinite().all()
    exact, rounded = (backend.weights for backend in backends)
    num_exact = 4 if family in ("qwen3_moe", "gpt_oss") else 1  # head and routers
    assert [type(weight) for weight in rounded].count(Tensor) == num_exact
    for weight, quantized_weight in zip(exact, rounded, strict=True):
        if isinstance(quantized_weight, Fp8Weight):
            found = quantized_weight.dequantize(torch.float32)
            # numbers have three bits behind the first; the smallest are multiples of 2^-9 / 448 of the largest
            torch.testing.assert_close(found, weight, rtol=2**-4, atol=float(weight.abs().max()) * 2**-16)
        else:
            assert torch.equal(quantized_weight, weight)


def test_load_model_quantization_of_fp8_checkpoint_changes_nothing(backends, tmp_path):
    small, _ = write_fp8_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", (24, 128))
    expected = logits_in_chunks(load(small), PROMPT, 40)
    assert torch.equal(logits_in_chunks(load(small, quantization="fp8"), PROMPT, 40), expected)
    with pytest.raises(
        ConfigError, match=r"int4 is not the format of the checkpoint: .* are stored as fp8, which is kept"
    ):
        load(small, quantization="int4", dtype="bfloat16")


def test_load_model_quantization_without_products_is_refused(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    with pytest.raises(ConfigError, match="`quantization`: the kernels for float32 on cpu have no products with fp8"):
        load(checkpoint, quantization="fp8")


def test_load_model_quantized_weights_beyond_memory_are_refused(backends, tmp_path):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    with pytest.raises(ConfigError, match=r"as bfloat16, but .* or take `quantization` fp8"):
        load(checkpoint, dtype="bfloat16", total_memory=1000)
    with pytest.raises(ConfigError, match=r"as fp8 and bfloat16, but .*pipeline_parallel_size`\)$"):
        load(checkpoint, dtype="bfloat16", total_memory=1000, quantization="fp8")


def test_load_model_wrong_scales_are_refused(tmp_path):
    small, _ = write_fp8_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", BLOCK)
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
        ({"quant_method": "fp8", "weight_block_size": [128]}, "`weight_block_size` must be two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "`weight_block_size` must be two sizes"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            "`activation_scheme` 'static' is not supported",
        ),
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
