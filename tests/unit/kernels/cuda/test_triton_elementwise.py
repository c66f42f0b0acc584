"""The embedding, the norms, the gates and the weighted sum of experts equal plain torch, and compile for every GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton_compile import HOPPER_FIRST, compile_kernel

from eagleray.kernels.cuda.triton import embedding, gate, norm, weighted_sum
from eagleray.kernels.params import ClampedSwiglu
from eagleray.kernels.torch.functional import clamped_swiglu, rms_norm, silu_and_mul

CLAMP = ClampedSwiglu(alpha=1.702, limit=0.8)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def strided(rows: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers between columns of NaN."""
    memory = poisoned(rows, size + 16, dtype=dtype)
    memory[:, 8:-8] = torch.randn(rows, size)
    return memory[:, 8:-8]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("last_dtype", [torch.int32, torch.int64])
def test_embed_ids_and_last_tokens_give_own_vectors_or_zeros(dtype: torch.dtype, last_dtype: torch.dtype) -> None:
    weight = strided(10, 24, dtype)
    last_tokens = torch.tensor([31, 7, 40, 29], dtype=last_dtype)
    lowest = -(1 << 31)
    ids = torch.tensor([30, 29, 39, 40, -1, -2, -3, -4, 0, -5, lowest, (1 << 31) - 1], dtype=torch.int32)
    out = poisoned(len(ids), 28)
    embedding.embed(ids, last_tokens, weight, first=30, out=out[:, :24])
    owned = {0: 0, 2: 9, 4: 1}  # token -> row of the weight
    for token in range(len(ids)):
        expected = weight[owned[token]].float() if token in owned else torch.zeros(24)
        assert torch.equal(out[token, :24], expected)
    assert out[:, 24:].isnan().all()


@pytest.mark.parametrize("first", [0, 5])
def test_embed_ids_that_are_no_row_give_zeros(first: int) -> None:
    out = poisoned(2, 16)
    ids = torch.tensor([-2, -9], dtype=torch.int32)
    embedding.embed(ids, torch.tensor([1]), torch.randn(20, 16), first=first, out=out)
    assert not out.any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 24, 256, 2880])
def test_rms_norm_strided_rows_equal_torch(dtype: torch.dtype, size: int) -> None:
    for kind in {torch.float32, dtype}:
        x, weight, out = strided(3, size, kind), torch.randn(size).to(dtype), poisoned(3, size, dtype=dtype)
        x[1] = 0
        norm.rms_norm(x, weight, 1e-5, out=out)
        assert_close(out, rms_norm(x.double(), weight.double(), 1e-5))


def test_rms_norm_rounds_once() -> None:
    x, weight, out = torch.randn(2, 500), torch.randn(500).half(), poisoned(2, 500, dtype=torch.float16)
    exact = poisoned(2, 500)
    norm.rms_norm(x, weight, 1e-6, out=out)
    norm.rms_norm(x, weight, 1e-6, out=exact)
    assert torch.equal(out, exact.half())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [24, 300])
def test_add_rms_norm_updates_the_hidden_state(dtype: torch.dtype, size: int) -> None:
    for kind in {torch.float32, dtype}:
        hidden, x, weight = strided(3, size), strided(3, size, kind), torch.randn(size).to(dtype)
        total, out = hidden + x.float(), poisoned(3, size, dtype=dtype)
        norm.add_rms_norm(hidden, x, weight, 1e-5, out=out)
        assert torch.equal(hidden, total)
        assert_close(out, rms_norm(total.double(), weight.double(), 1e-5))


def test_norms_rows_longer_than_a_block_equal_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "MAX_BLOCK", 64)
    hidden, x, weight, out = strided(2, 150), strided(2, 150), torch.randn(150), poisoned(2, 150)
    total = hidden + x
    norm.add_rms_norm(hidden, x, weight, 1e-5, out=out)
    assert torch.equal(hidden, total)
    assert_close(out, rms_norm(total.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [24, 1100])
def test_add_adds_rows(dtype: torch.dtype, size: int) -> None:
    hidden, x = strided(2, size), strided(2, size, dtype)
    total = hidden + x.float()
    norm.add(hidden, x)
    assert torch.equal(hidden, total)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("clamp", [None, CLAMP])
@pytest.mark.parametrize("size", [24, 1100])
def test_gate_equals_torch(dtype: torch.dtype, clamp: ClampedSwiglu | None, size: int) -> None:
    gate_up, out = strided(3, 2 * size, dtype) * 2, poisoned(3, size + 8, dtype=dtype)
    gate.gate(gate_up, clamp, out=out[:, :size])
    exact = gate_up.double()
    assert_close(out[:, :size], silu_and_mul(exact) if clamp is None else clamped_swiglu(exact, clamp))
    assert out[:, size:].isnan().all()


def test_gate_clamped_nan_stays() -> None:
    gate_up, out = torch.zeros(1, 4), torch.zeros(1, 2)
    gate_up[0, 0] = gate_up[0, 3] = torch.nan
    gate.gate(gate_up, CLAMP, out=out)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("accumulate", [False, True])
def test_weighted_sum_leaves_out_absent_slots(dtype: torch.dtype, accumulate: bool) -> None:
    outputs, weights = torch.randn(4, 3, 700).to(dtype), torch.rand(4, 3)
    slots = torch.tensor([[5, 0, 1], [2, -1, 3], [-1, -1, -1], [0, 1, -1]], dtype=torch.int32)
    expected = (outputs.double() * weights[:, :, None]).where(slots[:, :, None] >= 0, 0.0).sum(1)
    outputs[slots < 0], weights[slots < 0] = torch.nan, torch.nan
    hidden = strided(4, 700)
    expected = expected + hidden if accumulate else expected
    hidden = hidden if accumulate else poisoned(4, 700)
    weighted_sum.weighted_sum(outputs, weights, slots, out=hidden, accumulate=accumulate)
    assert_close(hidden, expected)


def test_weighted_sum_adds_in_order_of_experts() -> None:
    outputs = torch.tensor([1e8, 1.0, -1e8, 1.0])[None, :, None].expand(1, 4, 8).contiguous()
    out, slots = poisoned(1, 8), torch.zeros(1, 4, dtype=torch.int32)
    weighted_sum.weighted_sum(outputs, torch.ones(1, 4), slots, out=out, accumulate=False)
    assert (out == 1.0).all()


# ---- compilation


@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_elementwise_kernels_compile(capability: int, tmp_path: Path) -> None:
    rows = {"hidden": "*fp32", "x": "*bf16", "weight": "*bf16", "out": "*bf16"}
    strides = {"hidden_stride": "i32", "x_stride": "i32", "out_stride": "i32"}
    cases = [
        (
            embedding._embed,
            {"token_ids": "*i32", "last_tokens": "*i32", "weight": "*bf16", "out": "*fp32", "max_rows": "i32"}
            | dict.fromkeys(("first", "num_own", "weight_stride", "out_stride"), "i32"),
            {"SIZE": 2880, "BLOCK": embedding.BLOCK},
            4,
        ),
        *(
            (norm._rms_norm, rows | strides | {"eps": "fp32"}, {"ADD": True, "SIZE": size, "BLOCK": block}, warps)
            for size, block, warps in ((2880, 4096, 8), (7168, 8192, 8), (128, 128, 1), (16384, 8192, 8))
            if warps == norm.num_warps_of(block)
        ),
        (
            norm._add,
            {"hidden": "*fp32", "x": "*bf16", "hidden_stride": "i32", "x_stride": "i32"},
            {"SIZE": 2880, "BLOCK": norm.ADD_BLOCK},
            4,
        ),
        (
            gate._gate,
            {"gate_up": "*bf16", "out": "*bf16", "gate_up_stride": "i32", "out_stride": "i32"},
            gate.gate_constants(CLAMP) | {"SIZE": 2880, "BLOCK": gate.BLOCK},
            4,
        ),
        (
            weighted_sum._weighted_sum,
            {"outputs": "*bf16", "weights": "*fp32", "slots": "*i32", "out": "*fp32", "out_stride": "i32"},
            {"TOP_K": 8, "ACCUMULATE": True, "SIZE": 2048, "BLOCK": weighted_sum.BLOCK},
            4,
        ),
    ]
    for kernel, signature, constants, warps in cases:
        compiled = compile_kernel(
            *(kernel, signature, constants),
            capability=capability,
            num_warps=warps,
            num_stages=3,
            directory=tmp_path,
        )
        assert not compiled.spills
