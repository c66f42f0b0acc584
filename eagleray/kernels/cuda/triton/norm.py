"""RMS norms of rows, and sums of rows into the hidden state.

Everything is computed in float32 and rounded once, when a result is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 8192
"""Features that a program holds in registers. Longer rows are read twice."""

ADD_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
    """Write x / rms(x) * weight to `out`: [num_rows, size] of any dtype, both with any distance between rows."""
    _launch(x, None, weight, eps, out)


def add_rms_norm(hidden: Tensor, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
    """Add `x` to `hidden`, float32 [num_rows, size], and write the norm of the sum to `out`."""
    assert x.shape == hidden.shape
    _launch(hidden, x, weight, eps, out)


def _launch(hidden: Tensor, x: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    num_rows, size = hidden.shape
    assert weight.shape == (size,) and out.shape == hidden.shape
    assert hidden.stride(1) == out.stride(1) == weight.stride(0) == 1 and (x is None or x.stride(1) == 1)
    block = min(triton.next_power_of_2(size), MAX_BLOCK)
    _rms_norm[(num_rows,)](
        *(hidden, hidden if x is None else x, weight, out),
        *(hidden.stride(0), 0 if x is None else x.stride(0), out.stride(0), eps),
        ADD=x is not None,
        SIZE=size,
        BLOCK=block,
        num_warps=num_warps_of(block),
    )


def num_warps_of(block: int) -> int:
    """Return the warps of a program that holds a block of features: 16 bytes a thread at first, then more."""
    return min(max(block // 256, 1), 8)


@triton.jit
def _rms_norm(
    hidden,
    x,
    weight,
    out,
    hidden_stride,
    x_stride,
    out_stride,
    eps,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    hidden += row * hidden_stride
    x += row * x_stride
    out += row * out_stride
    # a row that fits is read once
    values = _sum_of(hidden, x, 0, ADD, SIZE, BLOCK)
    squares = values * values
    for start in tl.static_range(BLOCK, SIZE, BLOCK):
        more = _sum_of(hidden, x, start, ADD, SIZE, BLOCK)
        squares += more * more
    factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / SIZE + eps)
    _store_product(values, factor, weight, out, 0, SIZE, BLOCK)
    if SIZE > BLOCK and ADD:
        tl.debug_barrier()  # a thread may read sums that another one stored
    for start in tl.static_range(BLOCK, SIZE, BLOCK):
        _store_product(_sum_of(hidden, x, start, False, SIZE, BLOCK), factor, weight, out, start, SIZE, BLOCK)


@triton.jit
def _sum_of(hidden, x, start, ADD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return a block of a row of `hidden`, after `x` was added to it."""
    features = start + tl.arange(0, BLOCK)
    values = tl.load(hidden + features, mask=features < SIZE, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(x + features, mask=features < SIZE, other=0.0).to(tl.float32)
        tl.store(hidden + features, values, mask=features < SIZE)
    return values


@triton.jit
def _store_product(values, factor, weight, out, start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    features = start + tl.arange(0, BLOCK)
    scale = tl.load(weight + features, mask=features < SIZE, other=0.0).to(tl.float32)
    result = values * factor * scale
    tl.store(out + features, result.to(out.dtype.element_ty), mask=features < SIZE)


def add(hidden: Tensor, x: Tensor) -> None:
    """Add `x` to `hidden`, float32: both [num_rows, size], with any distance between rows."""
    num_rows, size = hidden.shape
    assert x.shape == hidden.shape and x.stride(1) == hidden.stride(1) == 1
    grid = num_rows, triton.cdiv(size, ADD_BLOCK)
    _add[grid](hidden, x, hidden.stride(0), x.stride(0), SIZE=size, BLOCK=ADD_BLOCK, num_warps=4)


@triton.jit
def _add(hidden, x, hidden_stride, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    _sum_of(hidden + row * hidden_stride, x + row * x_stride, start, True, SIZE, BLOCK)
