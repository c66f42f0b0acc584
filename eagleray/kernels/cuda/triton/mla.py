"""DeepSeek's multi-head latent attention (MLA) over the paged cache: one cached vector of a token serves all heads.

A cached vector is the normalized latent, followed by the rotated part of the key. Queries are absorbed: their plain
part is multiplied with the head's key matrix, so that its product with a latent is that with the head's key, and the
kernels return sums of latents. The caller multiplies around them, for n tokens and the heads of this rank:

    write_latents(..., absorbed=absorbed)                     # absorbed [n, num_heads, rank + rotated_dim]
    torch.bmm(plain.transpose(0, 1), params.keys, out=absorbed[..., :rank].transpose(0, 1))
    attend_latent_decodes(absorbed, ..., out=latents)         # or `attend_latent_tiles`; latents [n, num_heads, rank]
    torch.bmm(latents.transpose(0, 1), params.values.transpose(1, 2), out=outputs.transpose(0, 1))

where `plain` are the queries' first `plain_dim` features, [n, num_heads, plain_dim].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagleray.kernels.cuda.attention_work import MAX_SPLITS, SPLIT_KEYS
from eagleray.kernels.cuda.triton.attention import LOG2_E, AttentionTiling, fold_scores, multiply
from eagleray.kernels.cuda.triton.cache_write import HEADS_PER_PROGRAM, as_cached, load_angles
from eagleray.kernels.cuda.triton.decode_attention import SplitWorkspace, keys_of_split, merge_splits


@triton.jit
def _write_latents_kernel(
    latents,
    latents_stride,
    norm,
    eps,
    queries,
    queries_stride,
    cos,
    sin,
    num_positions,
    positions,
    slot_mapping,
    cache,
    absorbed,
    NUM_HEADS: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    RANK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    RANK_PADDED: tl.constexpr,
):
    HALF: tl.constexpr = ROTATED_DIM // 2
    WIDTH: tl.constexpr = RANK + ROTATED_DIM
    token = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, HALF_PADDED)[None, :]
    c, s = load_angles(cos, sin, tl.load(positions + token), num_positions, feature, HALF)
    if tl.program_id(1) == 0:
        # the token's latent and key
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            source, target = latents + token * latents_stride, cache + slot * WIDTH
            dtype: tl.constexpr = cache.dtype.element_ty
            latent_feature = tl.arange(0, RANK_PADDED)
            in_latent = latent_feature < RANK
            latent = tl.load(source + latent_feature, mask=in_latent, other=0.0).to(tl.float32)
            factor = tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + eps)
            weight = tl.load(norm + latent_feature, mask=in_latent, other=0.0).to(tl.float32)
            tl.store(target + latent_feature, as_cached(latent * factor * weight, dtype), mask=in_latent)
            first = tl.load(source + RANK + feature, mask=feature < HALF, other=0.0).to(tl.float32)
            second = tl.load(source + RANK + HALF + feature, mask=feature < HALF, other=0.0).to(tl.float32)
            tl.store(target + RANK + feature, as_cached(first * c - second * s, dtype), mask=feature < HALF)
            tl.store(target + RANK + HALF + feature, as_cached(second * c + first * s, dtype), mask=feature < HALF)
    else:
        head = ((tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        is_inside = (head < NUM_HEADS) & (feature < HALF)
        source = queries + token * queries_stride + head * (PLAIN_DIM + ROTATED_DIM) + PLAIN_DIM + feature
        target = absorbed + (token * NUM_HEADS + head) * WIDTH + RANK + feature
        first = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(target, (first * c - second * s).to(absorbed.dtype.element_ty), mask=is_inside)
        tl.store(target + HALF, (second * c + first * s).to(absorbed.dtype.element_ty), mask=is_inside)


def write_latents(
    latents: Tensor,
    queries: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    absorbed: Tensor,
) -> None:
    """Write normalized latents and rotated keys to the cache, and the queries' rotated part to `absorbed`, whose first
    `rank` features are left alone.

    latents: [num_tokens, rank + rotated_dim]; queries: [num_tokens, num_heads * (plain_dim + rotated_dim)]; of both
        only the rows may be strided. float32 or of the model's dtype.
    norm: [rank] weight of the latent's RMS norm.
    cos, sin: float32 [max_positions, rotated_dim / 2]; positions, slot_mapping: as in `write_keys_values`.
    cache: [num_blocks, block_size, rank + rotated_dim].
    absorbed: [num_tokens, num_heads, rank + rotated_dim], contiguous, of the model's dtype.
    """
    num_tokens, num_heads, width = absorbed.shape
    rank, rotated_dim = len(norm), 2 * cos.shape[1]
    assert latents.shape == (num_tokens, width) and cache.shape[2] == width == rank + rotated_dim
    assert latents.stride(1) == queries.stride(1) == 1
    assert cache.is_contiguous() and absorbed.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    if num_tokens == 0:
        return
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    _write_latents_kernel[(num_tokens, 1 + triton.cdiv(num_heads, heads))](
        latents,
        latents.stride(0),
        norm,
        eps,
        queries,
        queries.stride(0),
        cos,
        sin,
        len(cos),
        positions,
        slot_mapping,
        cache,
        absorbed,
        NUM_HEADS=num_heads,
        PLAIN_DIM=queries.shape[1] // num_heads - rotated_dim,
        ROTATED_DIM=rotated_dim,
        RANK=rank,
        HEADS=heads,
        HALF_PADDED=triton.next_power_of_2(rotated_dim // 2),
        RANK_PADDED=triton.next_power_of_2(rank),
        num_warps=4,
    )


def mla_tiling(num_vectors: int, dtype: torch.dtype, cache_dtype: torch.dtype, capability: int) -> AttentionTiling:
    """Return the tiling where `num_vectors` absorbed queries see the same keys: the heads of a query, or, of rows with
    several queries, any large number. `capability` is the device's (90 is Hopper, 0 a CPU)."""
    if dtype == torch.float32:
        return AttentionTiling(queries=16, keys=16, num_warps=8, num_stages=1)
    if cache_dtype.itemsize == 1:
        # the conversion of vectors needs registers that the sums of larger tiles take
        return AttentionTiling(queries=16, keys=32, num_warps=8, num_stages=5)
    if num_vectors > 32 and capability == 90:
        # 64 queries, and twice 64 cached vectors, fill the shared memory
        return AttentionTiling(queries=64, keys=64, num_warps=8, num_stages=2)
    if num_vectors > 16:
        return AttentionTiling(queries=32, keys=32, num_warps=8, num_stages=3)
    return AttentionTiling(queries=16, keys=32, num_warps=4, num_stages=5)


def latent_queries_per_tile(num_heads: int, tiling: AttentionTiling) -> int:
    """Return how many queries a tile has. If a query has more heads than fit, several programs share the tile."""
    return max(tiling.queries // num_heads, 1)


def latent_decode_programs(device: torch.device, tiling: AttentionTiling) -> int:
    """Return the number of programs for `attend_latent_decodes`: as many as run at a time on the device."""
    if device.type != "cuda":
        return 2
    at_once = 2 if tiling.num_warps == 4 else 1  # limited by registers and shared memory
    return torch.cuda.get_device_properties(device).multi_processor_count * at_once


@triton.jit
def _load_vectors(source, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr):
    """Load vectors of WIDTH features from the pointers `source` [n, 1]: their first RANK features and the others."""
    latent_feature, feature = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_P)[None, :]
    # masks that the sizes make needless would cost registers
    if RANK == BLOCK_R:
        latent = tl.load(source + latent_feature)
    else:
        latent = tl.load(source + latent_feature, mask=latent_feature < RANK, other=0.0)
    if WIDTH - RANK == BLOCK_P:
        rotated = tl.load(source + RANK + feature)
    else:
        rotated = tl.load(source + RANK + feature, mask=feature < WIDTH - RANK, other=0.0)
    return latent, rotated


@triton.jit
def _fold_latents(
    q_latent,
    q_rotated,
    running_max,
    running_sum,
    total,
    begin,
    end,
    position,
    score_scale,
    block_ids,
    cache,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Fold the cached vectors from `begin` to `end` into the running numbers of the queries at `position` [n, 1]."""
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # in place of keys behind the end, where memory may hold NaN, the last one is read
        read = tl.minimum(key, end - 1)
        block_id = tl.load(block_ids + read // BLOCK_SIZE).to(tl.int64)
        source = cache + ((block_id * BLOCK_SIZE + read % BLOCK_SIZE) * WIDTH)[:, None]
        latent, rotated = _load_vectors(source, RANK, WIDTH, BLOCK_R, BLOCK_P)
        latent, rotated = latent.to(q_latent.dtype), rotated.to(q_latent.dtype)
        products = tl.zeros([q_latent.shape[0], BLOCK_N], dtype=tl.float32)
        products = multiply(q_latent, tl.trans(latent), products)
        products = multiply(q_rotated, tl.trans(rotated), products)
        products = tl.where((key[None, :] <= position) & (key[None, :] < end), products, float("-inf"))
        weights, running_max, running_sum, total = fold_scores(products, score_scale, running_max, running_sum, total)
        total = multiply(weights.to(latent.dtype), latent, total)
    return running_max, running_sum, total


# for these parameters see `attend_tiles` and `attend_decodes`
@triton.jit(do_not_specialize=["block_table_stride"])
def _attend_latent_tiles_kernel(
    absorbed,
    cache,
    block_table,
    block_table_stride,
    seq_lens,
    query_start_loc,
    tiles,
    out,
    score_scale,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    PARTS: tl.constexpr = (QUERIES * NUM_HEADS + BLOCK_M - 1) // BLOCK_M
    part, tile = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    row = tl.load(tiles + 2 * tile)
    if row < 0:
        return
    first_query = tl.load(tiles + 2 * tile + 1)
    first_token = tl.load(query_start_loc + row)
    num_queries = tl.load(query_start_loc + row + 1) - first_token
    cached = tl.load(seq_lens + row) - num_queries  # before this step

    # either some queries with all their heads, or some heads of one query
    index = part * BLOCK_M + tl.arange(0, BLOCK_M)
    query = first_query + index // NUM_HEADS
    is_used = (index < QUERIES * NUM_HEADS) & (query < num_queries)
    vector = (first_token + query).to(tl.int64) * NUM_HEADS + index % NUM_HEADS
    # in place of a query behind the tile's, the first one is read
    first_vector = (first_token + first_query).to(tl.int64) * NUM_HEADS
    source = absorbed + tl.where(is_used, vector, first_vector)[:, None] * WIDTH
    q_latent, q_rotated = _load_vectors(source, RANK, WIDTH, BLOCK_R, BLOCK_P)
    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    end = cached + tl.minimum(first_query + QUERIES, num_queries)
    running_max, running_sum, total = _fold_latents(
        q_latent, q_rotated, running_max, running_sum, total, 0, end, (cached + query)[:, None], score_scale,
        block_table + row.to(tl.int64) * block_table_stride, cache,
        BLOCK_SIZE, RANK, WIDTH, BLOCK_N, BLOCK_R, BLOCK_P,
    )  # fmt: skip
    feature = tl.arange(0, BLOCK_R)[None, :]
    result = total / running_sum[:, None]
    target = out + (vector * RANK)[:, None] + feature
    tl.store(target, result.to(out.dtype.element_ty), mask=is_used[:, None] & (feature < RANK))


@triton.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=["maxima", "sums"])
def _attend_latent_splits_kernel(
    absorbed,
    cache,
    block_table,
    block_table_stride,
    seq_lens,
    work,
    num_work,
    totals,
    maxima,
    sums,
    out,
    score_scale,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    PARTS: tl.constexpr = (NUM_HEADS + BLOCK_M - 1) // BLOCK_M
    feature = tl.arange(0, BLOCK_R)[None, :]
    num_pieces = tl.load(num_work) * PARTS
    # the parts of the heads that read the same keys are neighbours
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        index = piece // PARTS
        head = (piece % PARTS) * BLOCK_M + tl.arange(0, BLOCK_M)
        is_head = head < NUM_HEADS
        row = tl.load(work + 2 * index).to(tl.int64)
        split = tl.load(work + 2 * index + 1)
        context = tl.load(seq_lens + row)
        split_keys = keys_of_split(context, SPLIT_KEYS, MAX_SPLITS)
        vector = row * NUM_HEADS + head
        # in place of a head behind the last, the row's first is read
        source = absorbed + tl.where(is_head, vector, row * NUM_HEADS)[:, None] * WIDTH
        q_latent, q_rotated = _load_vectors(source, RANK, WIDTH, BLOCK_R, BLOCK_P)
        running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        end = tl.minimum((split + 1) * split_keys, context)
        running_max, running_sum, total = _fold_latents(
            q_latent, q_rotated, running_max, running_sum, total, split * split_keys, end, end, score_scale,
            block_table + row * block_table_stride, cache,
            BLOCK_SIZE, RANK, WIDTH, BLOCK_N, BLOCK_R, BLOCK_P,
        )  # fmt: skip
        is_stored = is_head[:, None] & (feature < RANK)
        if context <= split_keys:
            result = total / running_sum[:, None]
            tl.store(out + (vector * RANK)[:, None] + feature, result.to(out.dtype.element_ty), mask=is_stored)
        else:
            result_head = (index * NUM_HEADS + head).to(tl.int64)
            tl.store(totals + (result_head * RANK)[:, None] + feature, total, mask=is_stored)
            tl.store(maxima + result_head, running_max, mask=is_head)
            tl.store(sums + result_head, running_sum, mask=is_head)


def attend_latent_tiles(
    absorbed: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    scale: float,
    tiling: AttentionTiling,
) -> None:
    """Write, for the queries of each tile and every head, the weighted sum of the latents that they see.

    absorbed: [num_tokens, num_heads, rank + rotated_dim]; out: [num_tokens, num_heads, rank]; both contiguous, of the
        model's dtype. Rows of `out` that no tile has are left alone.
    cache: [num_blocks, block_size, rank + rotated_dim]; this step's vectors are in it.
    tiles: int32 [num_tiles, 2] as by `attention_work.query_tiles` with `latent_queries_per_tile`; row -1: unused.
    scale: factor of the scores. The other parameters are those of `attend_tiles`.
    """
    num_heads, rank = out.shape[1:]
    assert absorbed.is_contiguous() and out.is_contiguous() and cache.is_contiguous() and tiles.is_contiguous()
    if len(tiles) == 0:
        return
    queries = latent_queries_per_tile(num_heads, tiling)
    _attend_latent_tiles_kernel[(triton.cdiv(queries * num_heads, tiling.queries) * len(tiles),)](
        absorbed,
        cache,
        block_table,
        block_table.stride(0),
        seq_lens,
        query_start_loc,
        tiles,
        out,
        scale * LOG2_E,
        NUM_HEADS=num_heads,
        RANK=rank,
        WIDTH=cache.shape[2],
        BLOCK_SIZE=cache.shape[1],
        QUERIES=queries,
        BLOCK_M=tiling.queries,
        BLOCK_N=tiling.keys,
        BLOCK_R=max(triton.next_power_of_2(rank), 16),
        BLOCK_P=max(triton.next_power_of_2(cache.shape[2] - rank), 16),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def attend_latent_decodes(
    absorbed: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    work: Tensor,
    num_work: Tensor,
    row_starts: Tensor,
    workspace: SplitWorkspace,
    out: Tensor,
    *,
    scale: float,
    tiling: AttentionTiling,
    num_programs: int,
    split_keys: int = SPLIT_KEYS,
    max_splits: int = MAX_SPLITS,
) -> None:
    """Write, for rows with one query each and every head, the weighted sum of the latents that they see.

    absorbed: [num_rows, num_heads, rank + rotated_dim]; out: [num_rows, num_heads, rank]; both contiguous, of the
        model's dtype: row i's query is token i. Padded rows of `out` are left alone.
    cache: [num_blocks, block_size, rank + rotated_dim]; this step's vectors are in it.
    workspace: with `rank` features; see `latent_split_keys` for `split_keys`.
    scale: factor of the scores. The other parameters are those of `attend_decodes`, without a window.
    """
    num_heads, rank = out.shape[1:]
    assert absorbed.is_contiguous() and out.is_contiguous() and cache.is_contiguous() and work.is_contiguous()
    assert workspace.totals.shape[1:] == (num_heads, rank)
    if len(seq_lens) == 0:
        return
    _attend_latent_splits_kernel[(num_programs,)](
        absorbed,
        cache,
        block_table,
        block_table.stride(0),
        seq_lens,
        work,
        num_work,
        workspace.totals,
        workspace.maxima,
        workspace.sums,
        out,
        scale * LOG2_E,
        NUM_HEADS=num_heads,
        RANK=rank,
        WIDTH=cache.shape[2],
        BLOCK_SIZE=cache.shape[1],
        SPLIT_KEYS=split_keys,
        MAX_SPLITS=max_splits,
        BLOCK_M=tiling.queries,
        BLOCK_N=tiling.keys,
        BLOCK_R=max(triton.next_power_of_2(rank), 16),
        BLOCK_P=max(triton.next_power_of_2(cache.shape[2] - rank), 16),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    merge_splits(seq_lens, row_starts, workspace, out, window=None, split_keys=split_keys, max_splits=max_splits)
