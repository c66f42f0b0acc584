"""Attention over the paged cache for any number of queries per row.

A program computes a tile: some consecutive queries of a row, with all query heads that share a key head, so that the
tile reads each key and value once. It goes through the keys in blocks at fixed positions and keeps the running maximum,
sum of weights and weighted sum of values of each query (Milakov and Gimelshein 2018, arXiv 1805.02867). A block that a
query does not see changes nothing of the query, bit by bit, so that a query's result does not depend on its tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
"""The kernels compute powers of 2, which is one instruction."""

SINK_SCALE = tl.constexpr(LOG2_E)


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """Sizes of an attention kernel's tiles, chosen by numbers that never change while a model runs."""

    queries: int
    """Rows of a tile: queries times the heads that share a key head."""
    keys: int
    """Keys of a block."""
    num_warps: int
    num_stages: int


def prefill_tiling(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, capability: int) -> AttentionTiling:
    """Return the tiling for queries of `dtype` on a device of this compute capability (90 is Hopper, 0 a CPU)."""
    if dtype == torch.float32:
        # no tensor cores: each thread computes products from its registers
        return AttentionTiling(queries=32, keys=16, num_warps=8, num_stages=1)
    if capability in (90, 100, 103):
        if head_dim > 128:
            return AttentionTiling(queries=64, keys=64, num_warps=8, num_stages=2)
        # registers for the conversion of 8-bit keys and values leave room for half as many
        return AttentionTiling(queries=128, keys=64 if cache_dtype.itemsize == 1 else 128, num_warps=8, num_stages=3)
    # products by HMMA need more registers, and GPUs for desktops have 99 KB of shared memory
    if head_dim > 128:
        return AttentionTiling(queries=64, keys=32, num_warps=8, num_stages=2)
    return AttentionTiling(queries=64, keys=64, num_warps=8 if head_dim > 64 else 4, num_stages=2)


def queries_per_tile(group: int, tiling: AttentionTiling) -> int:
    """Return how many queries a tile has where `group` query heads share a key head."""
    assert group <= tiling.queries, f"{group} heads share a key head; a tile has room for {tiling.queries}"
    return tiling.queries // group


def device_capability(device: torch.device) -> int:
    """Return the compute capability (90 is Hopper), or 0 of a CPU, on which the kernels are interpreted."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@triton.jit
def multiply(a, b, total):
    """Return `total` + a x b in float32. float32 operands are multiplied exactly, not rounded to tf32."""
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def fold_scores(products, score_scale, running_max, running_sum, total):
    """Fold the scores of a block, `products` (minus infinity if hidden) times a positive number, into the running
    numbers of each query. Scores are of base 2.

    Return the weights of the block's keys, and the new maximum, sum, and sum of values, which lacks this block's.
    """
    # Multiplied here, behind the mask: the compiler fuses the product with the difference below, and would not with a
    # mask in between, so that a block with a mask and one without would be rounded in different ways.
    scores = products * score_scale
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    # a query that has seen no key yet: infinity minus infinity would be NaN
    subtrahend = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - subtrahend[:, None])
    factor = tl.exp2(running_max - subtrahend)
    return weights, new_max, running_sum * factor + tl.sum(weights, axis=1), total * factor[:, None]


@triton.jit
def key_slots(block_ids, key, is_inside, BLOCK_SIZE: tl.constexpr):
    """Return the cache's slots (int64) of a row's keys; `block_ids` points to the row of the block table."""
    block_id = tl.load(block_ids + key // BLOCK_SIZE, mask=is_inside, other=0)
    return block_id.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE


@triton.jit
def _fold_keys(
    q,
    running_max,
    running_sum,
    total,
    begin,
    end,
    position,
    first_visible,
    score_scale,
    block_ids,
    keys,
    TOKEN_STRIDE: tl.constexpr,
    VALUES_OFFSET: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Fold the keys from `begin`, a multiple of BLOCK_N, to `end` into the running numbers of the queries `q`."""
    feature = tl.arange(0, BLOCK_D)[None, :]
    has_feature = feature < HEAD_DIM
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        if MASKED:
            # of hidden keys nothing is read, as memory behind a row may hold NaN
            is_inside = (key < end) & (key >= first_visible)
            offset = key_slots(block_ids, key, is_inside, BLOCK_SIZE)[:, None] * TOKEN_STRIDE + feature
            is_read = is_inside[:, None] & has_feature
            k = tl.load(keys + offset, mask=is_read, other=0.0)
            v = tl.load(keys + VALUES_OFFSET + offset, mask=is_read, other=0.0)
        else:
            block_id = tl.load(block_ids + key // BLOCK_SIZE).to(tl.int64)
            offset = (block_id * BLOCK_SIZE + key % BLOCK_SIZE)[:, None] * TOKEN_STRIDE + feature
            if HEAD_DIM == BLOCK_D:
                k = tl.load(keys + offset)
                v = tl.load(keys + VALUES_OFFSET + offset)
            else:
                k = tl.load(keys + offset, mask=has_feature, other=0.0)
                v = tl.load(keys + VALUES_OFFSET + offset, mask=has_feature, other=0.0)
        zeros = tl.zeros([q.shape[0], BLOCK_N], dtype=tl.float32)
        products = multiply(q, tl.trans(k.to(q.dtype)), zeros)
        if MASKED:
            is_visible = key[None, :] <= position[:, None]
            if WINDOW > 0:
                is_visible = is_visible & (key[None, :] > position[:, None] - WINDOW)
            products = tl.where(is_visible, products, float("-inf"))
        weights, running_max, running_sum, total = fold_scores(products, score_scale, running_max, running_sum, total)
        total = multiply(weights.to(q.dtype), v.to(q.dtype), total)
    return running_max, running_sum, total


# the block table is as wide as the batch needs, which must not make another version of the kernel
@triton.jit(do_not_specialize=["block_table_stride"])
def _attend_tiles_kernel(
    queries,
    cache,
    block_table,
    block_table_stride,
    seq_lens,
    query_start_loc,
    tiles,
    sinks,
    out,
    score_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    # one axis, because the others have at most 65,535 programs; the heads of a tile are neighbours
    kv_head, tile = tl.program_id(0) % NUM_KV_HEADS, tl.program_id(0) // NUM_KV_HEADS
    row = tl.load(tiles + 2 * tile)
    if row < 0:
        return
    first_query = tl.load(tiles + 2 * tile + 1)
    first_token = tl.load(query_start_loc + row)
    num_queries = tl.load(query_start_loc + row + 1) - first_token
    cached = tl.load(seq_lens + row) - num_queries  # before this step

    index = tl.arange(0, BLOCK_M)
    query = first_query + index // GROUP
    head = kv_head * GROUP + index % GROUP
    is_used = (index < QUERIES * GROUP) & (query < num_queries)
    feature = tl.arange(0, BLOCK_D)[None, :]
    offset = ((first_token + query).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + feature
    is_stored = is_used[:, None] & (feature < HEAD_DIM)
    q = tl.load(queries + offset, mask=is_stored, other=0.0)

    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if HAS_SINKS:
        running_max = tl.load(sinks + head, mask=is_used, other=0.0).to(tl.float32) * SINK_SCALE
        running_sum += 1.0

    first_position = cached + first_query
    end = cached + tl.minimum(first_query + QUERIES, num_queries)
    first_visible = 0
    begin = 0
    if WINDOW > 0:
        first_visible = tl.maximum(first_position - WINDOW + 1, 0)
        begin = first_visible // BLOCK_N * BLOCK_N
    else:
        # blocks that all queries see
        begin = (first_position + 1) // BLOCK_N * BLOCK_N
        running_max, running_sum, total = _fold_keys(
            q, running_max, running_sum, total, 0, begin, cached + query, 0, score_scale,
            block_table + row.to(tl.int64) * block_table_stride, cache + kv_head * HEAD_DIM,
            2 * NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, WINDOW, False, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    running_max, running_sum, total = _fold_keys(
        q, running_max, running_sum, total, begin, end, cached + query, first_visible, score_scale,
        block_table + row.to(tl.int64) * block_table_stride, cache + kv_head * HEAD_DIM,
        2 * NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, WINDOW, True, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    result = total / tl.where(is_used, running_sum, 1.0)[:, None]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=is_stored)


def attend_tiles(
    queries: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    tiling: AttentionTiling,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Write the attention of the queries of each tile over the cached keys and values that they see.

    queries, out: [num_tokens, num_heads * head_dim], contiguous, of the model's dtype. Rows of `out` that no tile has
        are left alone.
    cache: [num_blocks, block_size, 2 * num_kv_heads, head_dim]; this step's keys and values are in it.
    block_table: int32 [num_rows, max_blocks]; seq_lens: int32 [num_rows]; query_start_loc: int32 [num_rows + 1].
    tiles: int32 [num_tiles, 2] as by `attention_work.query_tiles`, made with `queries_per_tile` of the same tiling;
        row -1 for unused tiles.
    sinks: see `AttentionParams`.
    """
    num_kv_heads, head_dim = cache.shape[2] // 2, cache.shape[3]
    num_heads = queries.shape[1] // head_dim
    assert queries.is_contiguous() and out.is_contiguous() and cache.is_contiguous() and tiles.is_contiguous()
    queries_per_tile(num_heads // num_kv_heads, tiling)
    if len(tiles) == 0:
        return
    _attend_tiles_kernel[(num_kv_heads * len(tiles),)](
        queries,
        cache,
        block_table,
        block_table.stride(0),
        seq_lens,
        query_start_loc,
        tiles,
        sinks,
        out,
        head_dim**-0.5 * LOG2_E,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.shape[1],
        WINDOW=window or 0,
        HAS_SINKS=sinks is not None,
        BLOCK_M=tiling.queries,
        BLOCK_N=tiling.keys,
        BLOCK_D=max(triton.next_power_of_2(head_dim), 16),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
