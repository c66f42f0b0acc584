"""Gates of feed-forward layers: silu, and the clamped one of gpt-oss."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagleray.kernels.params import ClampedSwiglu

BLOCK = 1024
"""Outputs of one program."""


def gate(gate_up: Tensor, clamp: ClampedSwiglu | None, *, out: Tensor) -> None:
    """Write silu of the first half times the second half, or what `clamp` makes of them, to `out`: [num_rows,
    2 * size] -> [num_rows, size]. Computed in float32 and rounded once."""
    num_rows, size = out.shape
    assert gate_up.shape == (num_rows, 2 * size) and gate_up.stride(1) == out.stride(1) == 1
    grid = num_rows, triton.cdiv(size, BLOCK)
    _gate[grid](
        *(gate_up, out, gate_up.stride(0), out.stride(0)),
        **gate_constants(clamp),
        SIZE=size,
        BLOCK=BLOCK,
        num_warps=4,
    )


def gate_constants(clamp: ClampedSwiglu | None) -> dict[str, bool | float]:
    """Return the constants that kernels with a gate are compiled for."""
    if clamp is None:
        return {"CLAMPED": False, "ALPHA": 0.0, "LIMIT": 0.0}
    return {"CLAMPED": True, "ALPHA": clamp.alpha, "LIMIT": clamp.limit}


@triton.jit
def _gate(
    gate_up,
    out,
    gate_up_stride,
    out_stride,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_up += row * gate_up_stride + features
    gates = tl.load(gate_up, mask=features < SIZE, other=0.0).to(tl.float32)
    ups = tl.load(gate_up + SIZE, mask=features < SIZE, other=0.0).to(tl.float32)
    result = apply_gate(gates, ups, CLAMPED, ALPHA, LIMIT)
    tl.store(out + row * out_stride + features, result.to(out.dtype.element_ty), mask=features < SIZE)


@triton.jit
def apply_gate(gates, ups, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return gated float32 values, see `silu_and_mul` and `clamped_swiglu` of the torch backend."""
    if CLAMPED:
        # comparisons, because minimum and maximum of the device drop NaN
        gates = tl.where(gates > LIMIT, LIMIT, gates)
        ups = tl.where(ups > LIMIT, LIMIT, tl.where(ups < -LIMIT, -LIMIT, ups))
        return (ups + 1.0) * gates / (1.0 + tl.exp(-ALPHA * gates))
    return gates / (1.0 + tl.exp(-gates)) * ups
