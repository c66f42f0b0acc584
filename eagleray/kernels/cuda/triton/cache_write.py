"""Normalizes and rotates the heads of queries and keys, and writes keys and values to the cache, in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS_PER_PROGRAM = 8
"""Heads of a token that a program handles. A token of 32 query heads and 8 key heads makes 6 programs."""

MAX_FLOAT16 = tl.constexpr(65504.0)
MAX_FLOAT8 = tl.constexpr(448.0)
"""Largest finite numbers of float16 and float8_e4m3fn."""


@triton.jit
def as_cached(x, dtype: tl.constexpr):
    """Round float32 numbers to the cache's dtype.

    float16: an overflow must stay its own request's, so infinities become the largest number and NaN becomes 0, as in
    the torch backend's `write_cache`. float8_e4m3fn has no infinities: larger numbers become the largest; NaN stays.
    """
    if dtype == tl.float16:
        x = tl.where(x != x, 0.0, tl.minimum(tl.maximum(x, -MAX_FLOAT16), MAX_FLOAT16))
    elif dtype == tl.float8e4nv:
        x = tl.where(x != x, x, tl.minimum(tl.maximum(x, -MAX_FLOAT8), MAX_FLOAT8))
    return x.to(dtype)


@triton.jit
def load_angles(cos, sin, position, num_positions, feature, HALF: tl.constexpr):
    """Load cos and sin of one position for the features of a half.

    The table is not read for a position outside of it, which only padded tokens have.
    """
    is_valid = (position >= 0) & (position < num_positions) & (feature < HALF)
    offset = position.to(tl.int64) * HALF + feature
    return tl.load(cos + offset, mask=is_valid, other=1.0), tl.load(sin + offset, mask=is_valid, other=0.0)


@triton.jit
def _write_keys_values_kernel(
    qkv,
    qkv_stride,
    cos,
    sin,
    num_positions,
    positions,
    slot_mapping,
    q_norm,
    k_norm,
    eps,
    out_queries,
    cache,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    feature = tl.arange(0, HALF_PADDED)[None, :]
    is_inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (feature < HALF)
    source = qkv + token * qkv_stride + head * HEAD_DIM + feature
    first = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_inside, other=0.0).to(tl.float32)

    # values, behind queries and keys, are neither normalized nor rotated
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    normed_first, normed_second = first, second
    if HAS_NORM:
        mean_square = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM
        factor = tl.rsqrt(mean_square + eps)[:, None]
        is_query = head < NUM_HEADS
        q_first = tl.load(q_norm + feature, mask=feature < HALF, other=0.0).to(tl.float32)
        q_second = tl.load(q_norm + HALF + feature, mask=feature < HALF, other=0.0).to(tl.float32)
        k_first = tl.load(k_norm + feature, mask=feature < HALF, other=0.0).to(tl.float32)
        k_second = tl.load(k_norm + HALF + feature, mask=feature < HALF, other=0.0).to(tl.float32)
        normed_first = first * factor * tl.where(is_query, q_first, k_first)
        normed_second = second * factor * tl.where(is_query, q_second, k_second)
    c, s = load_angles(cos, sin, tl.load(positions + token), num_positions, feature, HALF)
    first = tl.where(is_value, first, normed_first * c - normed_second * s)
    second = tl.where(is_value, second, normed_second * c + normed_first * s)

    target = out_queries + token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + feature
    is_written = is_inside & (head < NUM_HEADS)
    query_dtype: tl.constexpr = out_queries.dtype.element_ty
    tl.store(target, first.to(query_dtype), mask=is_written)
    tl.store(target + HALF, second.to(query_dtype), mask=is_written)

    slot = tl.load(slot_mapping + token).to(tl.int64)
    target = cache + slot * (2 * NUM_KV_HEADS * HEAD_DIM) + (head - NUM_HEADS) * HEAD_DIM + feature
    is_written = is_inside & (head >= NUM_HEADS) & (slot >= 0)
    cache_dtype: tl.constexpr = cache.dtype.element_ty
    tl.store(target, as_cached(first, cache_dtype), mask=is_written)
    tl.store(target + HALF, as_cached(second, cache_dtype), mask=is_written)


def write_keys_values(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    out_queries: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Write the normalized and rotated queries to `out_queries`, keys and values to their slots of the cache.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], float32 or of the model's dtype; only its rows may be
        strided.
    cos, sin: float32 [max_positions, head_dim / 2], rows of `Rope.table`. The whole head is rotated.
    positions, slot_mapping: int32 [num_tokens]; nothing is cached for slot -1.
    cache: [num_blocks, block_size, 2 * num_kv_heads, head_dim]; float8_e4m3fn (from capability 8.9 on) has scale 1.
    out_queries: [num_tokens, num_heads * head_dim], contiguous, of the model's dtype.
    q_norm, k_norm: [head_dim] weights of the RMS norms, both or neither.
    """
    num_tokens, head_dim, num_kv_heads = len(qkv), cache.shape[3], cache.shape[2] // 2
    num_heads = out_queries.shape[1] // head_dim
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
    assert qkv.stride(1) == 1
    assert cache.is_contiguous() and out_queries.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert (q_norm is None) == (k_norm is None)
    if num_tokens == 0:
        return
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads + 2 * num_kv_heads))
    _write_keys_values_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        qkv,
        qkv.stride(0),
        cos,
        sin,
        len(cos),
        positions,
        slot_mapping,
        q_norm,
        k_norm,
        eps,
        out_queries,
        cache,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HAS_NORM=q_norm is not None,
        HEADS=heads,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
