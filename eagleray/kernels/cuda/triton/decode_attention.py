"""Attention over the paged cache for rows with one query: splits of a row's keys side by side, then a merge.

Splits begin at fixed positions, so that a row's result does not depend on its batch. A fixed number of programs takes
the splits from a list on the device, so that one captured graph serves rows of any length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagleray.kernels.cuda.attention_work import MAX_SPLITS, SPLIT_KEYS
from eagleray.kernels.cuda.triton.attention import (
    LOG2_E,
    SINK_SCALE,
    AttentionTiling,
    fold_scores,
    key_slots,
    multiply,
)

MERGED_FEATURES = 128
"""Features of a head that a program merges: those of 32 splits fit into its registers."""


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """Results of splits, from the kernel that computes them to the one that merges them, in order of the work."""

    totals: Tensor
    """float32 [capacity, num_heads, features]: sums of values, weighted with 2^(score - maximum)"""
    maxima: Tensor
    """float32 [capacity, num_heads]: highest score of base 2"""
    sums: Tensor
    """float32 [capacity, num_heads]: sum of the weights"""

    @staticmethod
    def num_floats(capacity: int, num_heads: int, features: int) -> int:
        """Return the size of the memory that `of` takes."""
        return capacity * num_heads * (features + 2)

    @classmethod
    def of(cls, memory: Tensor, capacity: int, num_heads: int, features: int) -> SplitWorkspace:
        """Divide float32 `memory` for at most `capacity` pieces of work. Layers may share it."""
        size = capacity * num_heads
        totals, maxima, sums = memory[: size * (features + 2)].split([size * features, size, size])
        return cls(
            totals.view(capacity, num_heads, features), maxima.view(capacity, num_heads), sums.view(capacity, num_heads)
        )


PROGRAMS_PER_MULTIPROCESSOR = 3
"""Programs of 70 KB of shared memory that fit into Hopper's 227."""


def decode_programs(device: torch.device) -> int:
    """Return the number of programs for `attend_decodes`: as many as run at a time on the device."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_MULTIPROCESSOR


def decode_tiling(group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> AttentionTiling:
    """Return the tiling of rows with one query where `group` query heads share a key head.

    Its tiles are small, so that several programs run on a multiprocessor and hide each other's waits for memory. The
    compiler keeps (num_stages - 1) / 2 blocks of keys and values on their way, because their addresses have to be
    loaded first.
    """
    queries = max(triton.next_power_of_2(group), 16)
    if dtype == torch.float32:
        return AttentionTiling(queries=queries, keys=16, num_warps=8, num_stages=1)
    if cache_dtype.itemsize == 1:
        return AttentionTiling(queries=queries, keys=32, num_warps=4, num_stages=7)
    keys = 64 if head_dim <= 128 else 16
    return AttentionTiling(queries=queries, keys=keys if queries == 16 else keys // 2, num_warps=4, num_stages=5)


@triton.jit
def keys_of_split(num_keys, SPLIT_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return the size of the splits of a row whose query sees `num_keys` keys, as `attention_work.split_work` does."""
    size = (num_keys + SPLIT_KEYS * (MAX_SPLITS - 1) - 1) // (SPLIT_KEYS * (MAX_SPLITS - 1)) * SPLIT_KEYS
    return tl.maximum(size, SPLIT_KEYS)


@triton.jit
def first_visible_key(context, WINDOW: tl.constexpr):
    """Return the first key that the last of `context` tokens sees."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    return first


# A batch decides how wide the block table is and where the parts of the workspace begin. Neither must make another
# version of a kernel.
@triton.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=["maxima", "sums"])
def _attend_splits_kernel(
    queries,
    cache,
    block_table,
    block_table_stride,
    seq_lens,
    work,
    num_work,
    sinks,
    totals,
    maxima,
    sums,
    out,
    score_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TOKEN_STRIDE: tl.constexpr = 2 * NUM_KV_HEADS * HEAD_DIM
    feature = tl.arange(0, BLOCK_D)[None, :]
    in_group = tl.arange(0, BLOCK_M)
    is_head = in_group < GROUP
    is_stored = is_head[:, None] & (feature < HEAD_DIM)
    num_pieces = tl.load(num_work) * NUM_KV_HEADS
    # the heads of a split are neighbours, as their keys are in memory
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        index = piece // NUM_KV_HEADS
        kv_head = piece % NUM_KV_HEADS
        row = tl.load(work + 2 * index).to(tl.int64)
        split = tl.load(work + 2 * index + 1)
        context = tl.load(seq_lens + row)
        first_key = first_visible_key(context, WINDOW)
        split_keys = keys_of_split(context - first_key, SPLIT_KEYS, MAX_SPLITS)
        is_first = split == first_key // split_keys
        is_last = (split + 1) * split_keys >= context
        begin = tl.maximum(split * split_keys, first_key // BLOCK_N * BLOCK_N)
        end = tl.minimum((split + 1) * split_keys, context)

        head = kv_head * GROUP + in_group
        offset = (row * NUM_HEADS + head)[:, None] * HEAD_DIM + feature
        q = tl.load(queries + offset, mask=is_stored, other=0.0)
        running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * SINK_SCALE
            running_max = tl.where(is_first, sink, running_max)
            running_sum = tl.where(is_first, 1.0, running_sum)

        block_ids = block_table + row * block_table_stride
        keys = cache + kv_head * HEAD_DIM
        for start in range(begin, end, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            # of hidden keys nothing is read, as memory behind a row may hold NaN
            is_visible = (key < end) & (key >= first_key)
            key_offset = key_slots(block_ids, key, is_visible, BLOCK_SIZE)[:, None] * TOKEN_STRIDE + feature
            is_read = is_visible[:, None] & (feature < HEAD_DIM)
            k = tl.load(keys + key_offset, mask=is_read, other=0.0).to(q.dtype)
            v = tl.load(keys + NUM_KV_HEADS * HEAD_DIM + key_offset, mask=is_read, other=0.0).to(q.dtype)
            products = multiply(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32))
            products = tl.where(is_visible[None, :], products, float("-inf"))
            weights, running_max, running_sum, total = fold_scores(
                products, score_scale, running_max, running_sum, total
            )
            total = multiply(weights.to(q.dtype), v, total)

        if is_first & is_last:
            result = total / running_sum[:, None]
            tl.store(out + offset, result.to(out.dtype.element_ty), mask=is_stored)
        else:
            result_head = (index * NUM_HEADS + head).to(tl.int64)
            tl.store(totals + result_head[:, None] * HEAD_DIM + feature, total, mask=is_stored)
            tl.store(maxima + result_head, running_max, mask=is_head)
            tl.store(sums + result_head, running_sum, mask=is_head)


@triton.jit(do_not_specialize_on_alignment=["maxima", "sums"])
def _merge_splits_kernel(
    seq_lens,
    row_starts,
    totals,
    maxima,
    sums,
    out,
    NUM_HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    feature = (tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    context = tl.load(seq_lens + row)
    first_key = first_visible_key(context, WINDOW)
    split_keys = keys_of_split(context - first_key, SPLIT_KEYS, MAX_SPLITS)
    num_splits = (context + split_keys - 1) // split_keys - first_key // split_keys
    if num_splits <= 1:
        return  # a padded row, or one whose only split is the result
    split = tl.arange(0, BLOCK_S)
    is_split = split < num_splits
    index = (tl.load(row_starts + row).to(tl.int64) + split) * NUM_HEADS + head
    maximum = tl.load(maxima + index, mask=is_split, other=float("-inf"))
    factor = tl.exp2(maximum - tl.max(maximum, axis=0))
    total_sum = tl.sum(tl.load(sums + index, mask=is_split, other=0.0) * factor, axis=0)
    is_read = is_split[:, None] & (feature < FEATURES)
    total = tl.load(totals + index[:, None] * FEATURES + feature, mask=is_read, other=0.0)
    result = tl.sum(total * factor[:, None], axis=0)[None, :] / total_sum
    target = out + (row * NUM_HEADS + head) * FEATURES + feature
    tl.store(target, result.to(out.dtype.element_ty), mask=feature < FEATURES)


def merge_splits(
    seq_lens: Tensor,
    row_starts: Tensor,
    workspace: SplitWorkspace,
    out: Tensor,
    *,
    window: int | None,
    split_keys: int,
    max_splits: int,
) -> None:
    """Write the results of rows with several splits to `out` [num_rows, num_heads, features] (contiguous, of any
    shape). A row's splits are merged in one order, which depends on nothing but their number."""
    num_heads, features = workspace.totals.shape[1:]
    block = min(MERGED_FEATURES, triton.next_power_of_2(features))
    _merge_splits_kernel[(len(seq_lens), num_heads, triton.cdiv(features, block))](
        seq_lens,
        row_starts,
        workspace.totals,
        workspace.maxima,
        workspace.sums,
        out,
        NUM_HEADS=num_heads,
        FEATURES=features,
        WINDOW=window or 0,
        SPLIT_KEYS=split_keys,
        MAX_SPLITS=max_splits,
        BLOCK_S=triton.next_power_of_2(max_splits),
        BLOCK_D=block,
        num_warps=4,
    )


def attend_decodes(
    queries: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    work: Tensor,
    num_work: Tensor,
    row_starts: Tensor,
    workspace: SplitWorkspace,
    out: Tensor,
    *,
    num_programs: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    split_keys: int = SPLIT_KEYS,
    max_splits: int = MAX_SPLITS,
) -> None:
    """Write the attention of rows with one query each over the cached keys and values that they see.

    queries, out: [num_rows, num_heads * head_dim], contiguous, of the model's dtype: row i's query is token i. Padded
        rows of `out` are left alone.
    cache: [num_blocks, block_size, 2 * num_kv_heads, head_dim]; this step's keys and values are in it.
    block_table: int32 [num_rows, max_blocks]; seq_lens: int32 [num_rows], 0 for padded rows. Rows with several queries
        are not among them.
    work: int32 [capacity, 2], num_work: int32 [1], row_starts: int32 [num_rows]: `attention_work.split_work` of the
        same window, split_keys and max_splits, and the length of its list.
    workspace: has room for `num_work` pieces.
    num_programs: how many programs share the work, such as `decode_programs`; it changes no result.
    sinks: see `AttentionParams`.
    """
    num_kv_heads, head_dim = cache.shape[2] // 2, cache.shape[3]
    num_heads = queries.shape[1] // head_dim
    assert queries.is_contiguous() and out.is_contiguous() and cache.is_contiguous() and work.is_contiguous()
    assert workspace.totals.shape[1:] == (num_heads, head_dim)
    if len(seq_lens) == 0:
        return
    tiling = decode_tiling(num_heads // num_kv_heads, head_dim, queries.dtype, cache.dtype)
    _attend_splits_kernel[(num_programs,)](
        queries,
        cache,
        block_table,
        block_table.stride(0),
        seq_lens,
        work,
        num_work,
        sinks,
        workspace.totals,
        workspace.maxima,
        workspace.sums,
        out,
        head_dim**-0.5 * LOG2_E,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.shape[1],
        WINDOW=window or 0,
        HAS_SINKS=sinks is not None,
        SPLIT_KEYS=split_keys,
        MAX_SPLITS=max_splits,
        BLOCK_M=tiling.queries,
        BLOCK_N=tiling.keys,
        BLOCK_D=max(triton.next_power_of_2(head_dim), 16),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    merge_splits(seq_lens, row_starts, workspace, out, window=window, split_keys=split_keys, max_splits=max_splits)
