"""Models whose weights are quantized when they are loaded, or kept in few bits, on the CPU kernels."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from checkpoints import make_checkpoint
from harness import random_prompt
from model_runs import PagedRun, load, logits_in_chunks
from quantized_checkpoints import pack_mxfp4, write_fp8_checkpoint
from ranks import run_ranks, topology
from weight_pushes import copy_of_weights, have_equal_bytes, memory_of_weights, tensors_of

from eagleray.errors import ConfigError
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.grouped import Encoding
from eagleray.kernels.quantized import WeightFormat
from eagleray.models.base import Model
from eagleray.models.quantization import formats_by_role
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import WeightRole

PROMPT = random_prompt(0, 60, 384)
EXPERTS = {"moe_intermediate_size": 64}  # groups of 32 divide them
FAMILIES = {"qwen3": {}, "qwen3_moe": EXPERTS, "deepseek_v3": EXPERTS, "gpt_oss": {}}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    family = request.param
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, tokenizer=False, **FAMILIES[family])


@pytest.fixture
def packed(monkeypatch) -> Counter[Encoding | None]:
    """The number of packed weights by encoding."""
    counts: Counter[Encoding | None] = Counter()
    make = CpuBackend._linear

    def counting(self, *args, **kwargs):
        linear = make(self, *args, **kwargs)
        counts[linear.grouping and linear.grouping.encoding] += 1
        return linear

    monkeypatch.setattr(CpuBackend, "_linear", counting)
    return counts


def divergence(model: Model, exact: torch.Tensor) -> float:
    """The mean divergence of the model's predictions from those of exact logits."""
    expected, found = exact.float().log_softmax(-1), logits_in_chunks(model, PROMPT, 60).float().log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_load_model_quantization_keeps_the_formats_of_the_roles(checkpoint, load_format, packed):
    for kind, encoding in (("int8", Encoding.HALF_INT8), ("int4", Encoding.INT4), ("fp8", Encoding.E4M3)):
        packed.clear()
        spec = load(checkpoint, dtype="bfloat16", quantization=kind, load_format=load_format).spec
        assert packed[encoding] > 0
        num_plain = spec.num_layers if spec.moe is not None and spec.mla is None else 0  # routers
        if kind == "fp8":
            num_plain += 1  # the head
        assert packed[None] <= num_plain + (
            3 * spec.num_layers if spec.mla is not None else 0
        )  # inputs without whole groups
        if kind == "int4":
            assert (packed[Encoding.HALF_INT8] > 1) is (spec.moe is not None)  # attention and head, or the head alone


def test_load_model_quantization_diverges_less_with_more_bits(checkpoint):
    exact = logits_in_chunks(load(checkpoint, dtype="bfloat16"), PROMPT, 60)
    of_int8, of_int4 = (
        divergence(load(checkpoint, dtype="bfloat16", quantization=kind), exact) for kind in ("int8", "int4")
    )
    assert 0 < 2 * of_int8 < of_int4 < 1  # routers near a tie choose other experts also with 8 bits


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_forward_quantized_row_has_the_same_bits_in_any_batch(family, kind, tmp_path):
    model = load(make_checkpoint(tmp_path, family, tokenizer=False), dtype="bfloat16", quantization=kind)
    whole = logits_in_chunks(model, PROMPT, 60)
    for chunk in (17, 1):
        assert torch.equal(logits_in_chunks(model, PROMPT, chunk), whole)
    run = PagedRun(model)
    for number in range(3):
        run.add(str(number), PROMPT[number:])
    run.step({"0": 59, "1": 10})
    assert torch.equal(run.step({"0": 1, "1": 20, "2": 58})["0"], whole[-1:])


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_forward_quantized_on_two_ranks_equals_one(kind, tmp_path):
    """Blocks lie within the columns of a rank, so both have the same numbers."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 128}
    checkpoint = make_checkpoint(tmp_path, "qwen3", tokenizer=False, **sizes)
    alone = logits_in_chunks(load(checkpoint, dtype="bfloat16", quantization=kind), PROMPT, 60)
    results = run_ranks(
        lambda groups: logits_in_chunks(
            load(checkpoint, dtype="bfloat16", quantization=kind, groups=groups), PROMPT, 60
        ),
        topology(tp=2),
    )
    torch.testing.assert_close(results[0], alone, atol=0.05, rtol=0)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_load_weights_model_quantized_at_load_quantizes_pushes(kind, load_format, tmp_path):
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    expected = copy_of_weights(load(checkpoint, dtype="bfloat16", quantization=kind))
    model = load(checkpoint, dtype="bfloat16", quantization=kind, load_format=load_format)
    model.load_weights((name, torch.ones_like(tensor)) for name, tensor in tensors_of(checkpoint))
    assert not have_equal_bytes(memory_of_weights(model), expected)
    model.load_weights(tensors_of(checkpoint))
    assert have_equal_bytes(memory_of_weights(model), expected)


# ---- checkpoints in few bits


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_load_model_fp8_is_kept_and_nearer_to_the_numbers_than_bfloat16(family, packed, tmp_path):
    fields = {"hidden_size": 128, "intermediate_size": 256}
    small, plain = write_fp8_checkpoint(tmp_path / "plain", family, tmp_path / "small", (128, 128), **fields)
    exact = logits_in_chunks(load(plain, dtype="float32"), PROMPT, 60)
    packed.clear()
    found = logits_in_chunks(load(small, dtype="bfloat16"), PROMPT, 60)
    assert packed[Encoding.E4M3] > 0
    rounded = logits_in_chunks(load(plain, dtype="bfloat16"), PROMPT, 60)
    assert (found - exact).square().mean() < 1.2 * (rounded - exact).square().mean()


def test_load_model_mxfp4_is_kept_and_equals_decoded_experts(packed, tmp_path, monkeypatch):
    checkpoint = make_checkpoint(tmp_path, "gpt_oss", tokenizer=False)
    pack_mxfp4(checkpoint)
    found = logits_in_chunks(load(checkpoint, dtype="bfloat16"), PROMPT, 60)
    assert packed[Encoding.E2M1] > 0
    keep = CpuBackend.__init__

    def keep_nothing(self, *args, **kwargs):
        keep(self, *args, **kwargs)
        self.kept_formats = frozenset()

    monkeypatch.setattr(CpuBackend, "__init__", keep_nothing)
    expected = logits_in_chunks(load(checkpoint, dtype="bfloat16"), PROMPT, 60)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)  # the same numbers, added up in another order


def test_load_model_int8_of_mxfp4_checkpoint_is_refused(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "gpt_oss", tokenizer=False)
    pack_mxfp4(checkpoint)
    with pytest.raises(ConfigError, match=r"`quantization`: .*stored as mxfp4, which is kept; drop it"):
        load(checkpoint, dtype="bfloat16", quantization="int8")


def test_formats_by_role_dense_attention_has_four_bits(tmp_path):
    dense, mixture = (spec_of(tmp_path / family, family) for family in ("qwen3", "qwen3_moe"))
    assert formats_by_role(dense, WeightFormat.INT4)[WeightRole.ATTENTION] is WeightFormat.INT4
    assert formats_by_role(mixture, WeightFormat.INT4)[WeightRole.ATTENTION] is WeightFormat.INT8
    assert WeightRole.HEAD not in formats_by_role(dense, WeightFormat.FP8)


def spec_of(directory, family: str) -> ModelSpec:
    return load(make_checkpoint(directory, family, tokenizer=False)).spec
