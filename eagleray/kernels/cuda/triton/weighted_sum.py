"""Weighted sums of the outputs of each token's experts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512
"""Features that one program sums."""


def weighted_sum(outputs: Tensor, weights: Tensor, slots: Tensor, *, out: Tensor, accumulate: bool) -> None:
    """Write the sum over a token's experts of output times weight to `out` [num_tokens, hidden_size], or add it.

    `outputs`: [num_tokens, top_k, hidden_size]; `weights`: float32 [num_tokens, top_k]; `slots`: int32 [num_tokens,
    top_k], where a negative one contributes nothing: its output is not read. Float32 sums in order of the experts.
    """
    num_tokens, top_k, hidden_size = outputs.shape
    assert out.shape == (num_tokens, hidden_size) and weights.shape == slots.shape == (num_tokens, top_k)
    assert outputs.is_contiguous() and weights.is_contiguous() and slots.is_contiguous() and out.stride(1) == 1
    grid = num_tokens, triton.cdiv(hidden_size, BLOCK)
    _weighted_sum[grid](
        *(outputs, weights, slots, out, out.stride(0)),
        TOP_K=top_k,
        ACCUMULATE=accumulate,
        SIZE=hidden_size,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit
def _weighted_sum(
    outputs,
    weights,
    slots,
    out,
    out_stride,
    TOP_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        is_present = tl.load(slots + pair) >= 0
        weight = tl.load(weights + pair, mask=is_present, other=0.0)
        values = tl.load(outputs + pair * SIZE + features, mask=is_present & (features < SIZE), other=0.0)
        total += values.to(tl.float32) * weight
    out += token * out_stride + features
    if ACCUMULATE:
        total += tl.load(out, mask=features < SIZE, other=0.0).to(tl.float32)
    tl.store(out, total.to(out.dtype.element_ty), mask=features < SIZE)
