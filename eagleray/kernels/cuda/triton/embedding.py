"""Lookup of the vectors of tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Features that one program copies."""


def embed(token_ids: Tensor, last_tokens: Tensor, weight: Tensor, *, first: int, out: Tensor) -> None:
    """Write the vectors of tokens to `out`, float32 [num_tokens, hidden_size].

    `token_ids`: int32 [num_tokens]; a negative id -1 - row stands for `last_tokens[row]`. `last_tokens`: int32 or int64
    [max_rows]. `weight`: [num_own, hidden_size], the vectors of the tokens from id `first` on; other tokens get zeros.
    """
    num_own, hidden_size = weight.shape
    assert out.shape == (len(token_ids), hidden_size) and weight.stride(1) == out.stride(1) == 1
    grid = len(token_ids), triton.cdiv(hidden_size, BLOCK)
    _embed[grid](
        *(token_ids, last_tokens, weight, out, len(last_tokens), first, num_own, weight.stride(0), out.stride(0)),
        SIZE=hidden_size,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["max_rows", "first", "num_own"])
def _embed(
    token_ids,
    last_tokens,
    weight,
    out,
    max_rows,
    first,
    num_own,
    weight_stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    token_id = tl.load(token_ids + token)
    row = -1 - token_id
    # a padded token may have any id; what is no row is no token either, because it stays negative
    token_id = tl.load(last_tokens + row, mask=(row >= 0) & (row < max_rows), other=token_id).to(tl.int32)
    own = token_id - first
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_own = (token_id >= 0) & (own >= 0) & (own < num_own)
    values = tl.load(weight + own.to(tl.int64) * weight_stride + features, mask=is_own & (features < SIZE), other=0.0)
    tl.store(out + token.to(tl.int64) * out_stride + features, values.to(tl.float32), mask=features < SIZE)
