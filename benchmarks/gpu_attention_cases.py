"""Attention over a paged cache: rows with one query, tiles of queries, and both with latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gpu_case import KernelCase, KernelRun
from gpu_floors import RowWork, Work, _keys_read, _pairs
from torch import Tensor

from eagleray.kernels.cuda.attention_work import MAX_SPLITS, SPLIT_KEYS, latent_split_keys, query_tiles, split_work
from eagleray.kernels.cuda.triton.attention import attend_tiles, device_capability, prefill_tiling, queries_per_tile
from eagleray.kernels.cuda.triton.decode_attention import SplitWorkspace, attend_decodes, decode_programs
from eagleray.kernels.cuda.triton.mla import (
    attend_latent_decodes,
    attend_latent_tiles,
    latent_decode_programs,
    latent_queries_per_tile,
    mla_tiling,
    write_latents,
)
from eagleray.kernels.rope import Rope
from eagleray.kernels.rope_spec import DefaultRope

BLOCK = 16

FLASHINFER_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class CachedRows:
    """Metadata of rows whose blocks are in any order. The lengths are kept on the host, too."""

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    lengths: np.ndarray
    starts: np.ndarray

    @classmethod
    def make(cls, rows: list[tuple[int, int]], device: torch.device) -> CachedRows:
        """Make rows of (cached tokens, queries)."""
        contexts = np.array([cached + queries for cached, queries in rows], np.int32)
        starts = np.cumsum([0, *(queries for _, queries in rows)]).astype(np.int32)
        sizes = -(-contexts // BLOCK)
        ids = torch.randperm(int(sizes.sum()), device=device, dtype=torch.int32)
        table = torch.zeros(len(rows), int(sizes.max()), device=device, dtype=torch.int32)
        for row, part in enumerate(ids.split(sizes.tolist())):
            table[row, : len(part)] = part
        lengths_and_starts = (torch.from_numpy(array).to(device) for array in (contexts, starts))
        return cls(table, *lengths_and_starts, contexts, starts)

    @property
    def num_blocks(self) -> int:
        return int((-(-self.lengths // BLOCK)).sum())

    def cached(self, cache: Tensor, row: int) -> Tensor:
        """Return the vectors of a row's tokens, float32 [tokens, ...]."""
        length = int(self.lengths[row])
        ids = self.block_table[row, : -(-length // BLOCK)].long()
        # as bytes, because torch does not index every tensor of eight-bit floats
        bits = cache.view(torch.uint8) if cache.itemsize == 1 else cache
        return bits[ids].view(cache.dtype).flatten(0, 1)[:length].float()

    def queries(self, row: int) -> slice:
        return slice(int(self.starts[row]), int(self.starts[row + 1]))


def weights_of(scores: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    """Return the weights of scores [heads, queries, keys] of the last queries of a row. `sinks`: [heads]."""
    num_queries, num_keys = scores.shape[1:]
    position = torch.arange(num_keys - num_queries, num_keys, device=scores.device)[:, None]
    key = torch.arange(num_keys, device=scores.device)
    is_hidden = key > position
    if window is not None:
        is_hidden |= key <= position - window
    scores = scores.masked_fill(is_hidden, -torch.inf)
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.float()[:, None, None].expand(-1, num_queries, 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]


def attention_of(rows: CachedRows, queries: Tensor, cache: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    """Compute the attention in float32, one key head of one row at a time."""
    kv_heads, head_dim = cache.shape[2] // 2, cache.shape[3]
    group = queries.shape[1] // head_dim // kv_heads
    out = torch.empty(queries.shape, device=queries.device)
    for row in range(len(rows.lengths)):
        cached, own = rows.cached(cache, row), rows.queries(row)
        mine = queries[own].float().unflatten(1, (kv_heads, group, head_dim))
        results = out[own].unflatten(1, (kv_heads, group, head_dim))
        for head in range(kv_heads):
            scores = mine[:, head].transpose(0, 1) @ cached[:, head].T * head_dim**-0.5  # [group, queries, keys]
            of_head = None if sinks is None else sinks[head * group : (head + 1) * group]
            weights = weights_of(scores, window, of_head)
            results[:, head] = (weights @ cached[:, kv_heads + head]).transpose(0, 1)
    return out


def attention(
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    has_sinks: bool = False,
    is_fp8: bool = False,
) -> KernelRun:
    """Prepare the kernel for rows with one query each, or for tiles of queries if a row has several."""
    metadata = CachedRows.make(rows, device)
    cache = torch.randn(metadata.num_blocks, BLOCK, 2 * kv_heads, head_dim, device=device).to(dtype)
    cache = cache.to(torch.float8_e4m3fn) if is_fp8 else cache
    queries = torch.randn(sum(count for _, count in rows), heads * head_dim, device=device).to(dtype)
    sinks = torch.randn(heads, device=device).to(dtype) if has_sinks else None
    out = torch.empty_like(queries)
    is_decode = all(count == 1 for _, count in rows)
    make = _decode_launch if is_decode else _tiles_launch
    works = [RowWork(count, cached) for cached, count in rows]
    read = sum(_keys_read(row, window) for row in works) * 2 * kv_heads * head_dim * cache.itemsize
    yardstick = None
    if not (has_sinks or is_fp8 or window):
        yardstick = lambda: _flashinfer(metadata, queries, cache, is_decode=is_decode)  # noqa: E731
    return KernelRun(
        launch=make(metadata, queries, cache, out, window, sinks),
        results=lambda: [out],
        expected=lambda: [attention_of(metadata, queries, cache, window, sinks)],
        work=Work(read + 2 * queries.nbytes, 4.0 * heads * head_dim * sum(_pairs(row, window) for row in works)),
        tolerance=2e-2 if dtype == torch.bfloat16 else 1e-5,
        yardstick=yardstick,
    )


def _decode_launch(
    rows: CachedRows, queries: Tensor, cache: Tensor, out: Tensor, window: int | None, sinks: Tensor | None
) -> Callable[[], None]:
    device, (_, heads_and_features) = queries.device, queries.shape
    head_dim = cache.shape[3]
    work, starts, num_work, workspace = _splits(rows, heads_and_features // head_dim, head_dim, window, SPLIT_KEYS)
    return lambda: attend_decodes(
        queries,
        cache,
        rows.block_table,
        rows.seq_lens,
        work,
        num_work,
        starts,
        workspace,
        out,
        num_programs=decode_programs(device),
        window=window,
        sinks=sinks,
    )


def _splits(
    rows: CachedRows, heads: int, features: int, window: int | None, split_keys: int
) -> tuple[Tensor, Tensor, Tensor, SplitWorkspace]:
    device = rows.seq_lens.device
    work, starts = split_work(rows.lengths, window, split_keys, MAX_SPLITS)
    memory = torch.empty(SplitWorkspace.num_floats(len(work), heads, features), device=device)
    return (
        torch.from_numpy(work).to(device),
        torch.from_numpy(starts).to(device),
        torch.tensor([len(work)], dtype=torch.int32, device=device),
        SplitWorkspace.of(memory, len(work), heads, features),
    )


def _tiles_launch(
    rows: CachedRows, queries: Tensor, cache: Tensor, out: Tensor, window: int | None, sinks: Tensor | None
) -> Callable[[], None]:
    device, head_dim = queries.device, cache.shape[3]
    tiling = prefill_tiling(head_dim, queries.dtype, cache.dtype, device_capability(device))
    group = queries.shape[1] // head_dim // (cache.shape[2] // 2)
    tiles = torch.from_numpy(query_tiles(rows.starts, rows.lengths, queries_per_tile(group, tiling))).to(device)
    return lambda: attend_tiles(
        queries,
        cache,
        rows.block_table,
        rows.seq_lens,
        rows.query_start_loc,
        tiles,
        out,
        tiling=tiling,
        window=window,
        sinks=sinks,
    )


def latent_attention(
    device: torch.device, dtype: torch.dtype, *, rows: list[tuple[int, int]], heads: int, rank: int, rotated: int
) -> KernelRun:
    metadata = CachedRows.make(rows, device)
    cache = torch.randn(metadata.num_blocks, BLOCK, rank + rotated, device=device).to(dtype)
    num_tokens = sum(count for _, count in rows)
    absorbed = torch.randn(num_tokens, heads, rank + rotated, device=device).to(dtype)
    out = torch.empty(num_tokens, heads, rank, device=device, dtype=dtype)
    scale = (rank + rotated) ** -0.5
    is_decode = all(count == 1 for _, count in rows)

    def expected() -> list[Tensor]:
        result = torch.empty(out.shape, device=device)
        for row in range(len(rows)):
            cached, own = metadata.cached(cache, row), metadata.queries(row)
            scores = absorbed[own].float().transpose(0, 1) @ cached.T * scale  # [heads, queries, keys]
            result[own] = (weights_of(scores, None, None) @ cached[:, :rank]).transpose(0, 1)
        return [result]

    works = [RowWork(count, cached) for cached, count in rows]
    read = sum(_keys_read(row, None) for row in works) * cache.shape[2] * cache.itemsize
    pairs = sum(_pairs(row, None) for row in works)
    launch = _latent_decode_launch if is_decode else _latent_tiles_launch
    return KernelRun(
        launch=launch(metadata, absorbed, cache, out, scale),
        results=lambda: [out],
        expected=expected,
        work=Work(read + absorbed.nbytes + out.nbytes, 2.0 * heads * (2 * rank + rotated) * pairs),
        tolerance=2e-2 if dtype == torch.bfloat16 else 1e-5,
    )


def write_latent_rows(
    device: torch.device, dtype: torch.dtype, *, tokens: int, heads: int, plain: int, rank: int, rotated: int
) -> KernelRun:
    latents = torch.randn(tokens, rank + rotated, device=device).to(dtype)
    queries = torch.randn(tokens, heads * (plain + rotated), device=device).to(dtype)
    norm = torch.randn(rank, device=device).to(dtype)
    rope = Rope(DefaultRope(1e4), rotated, dtype=torch.float32, device=device)
    positions = torch.arange(tokens, device=device, dtype=torch.int32)
    cos, sin = rope.table(positions)
    num_blocks = -(-tokens // BLOCK)
    slots = torch.randperm(num_blocks * BLOCK, device=device, dtype=torch.int32)[:tokens]
    cache = torch.zeros(num_blocks, BLOCK, rank + rotated, device=device, dtype=dtype)
    absorbed = torch.zeros(tokens, heads, rank + rotated, device=device, dtype=dtype)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)  # [tokens, heads, rotated / 2]
        return torch.cat(
            (first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None]), dim=-1
        )

    def expected() -> list[Tensor]:
        latent = latents[:, :rank].float()
        latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + 1e-6) * norm.float()
        cached = torch.zeros(cache.shape, device=device).flatten(0, 1)
        cached[slots.long()] = torch.cat((latent, rotate(latents[:, None, rank:])[:, 0]), dim=1)
        rows = torch.zeros(absorbed.shape, device=device)
        rows[..., rank:] = rotate(queries.view(tokens, heads, -1)[..., plain:])
        return [cached.view(cache.shape), rows]

    return KernelRun(
        launch=lambda: write_latents(latents, queries, norm, 1e-6, cos, sin, positions, slots, cache, absorbed),
        results=lambda: [cache, absorbed],
        expected=expected,
        work=Work(2.0 * latents.nbytes + 2.0 * tokens * heads * rotated * dtype.itemsize),
        is_poisoned=False,
    )


def _latent_decode_launch(
    rows: CachedRows, absorbed: Tensor, cache: Tensor, out: Tensor, scale: float
) -> Callable[[], None]:
    device, heads, rank = absorbed.device, absorbed.shape[1], out.shape[2]
    tiling = mla_tiling(heads, absorbed.dtype, cache.dtype, device_capability(device))
    split_keys = latent_split_keys(heads)
    work, starts, num_work, workspace = _splits(rows, heads, rank, None, split_keys)
    return lambda: attend_latent_decodes(
        absorbed,
        cache,
        rows.block_table,
        rows.seq_lens,
        work,
        num_work,
        starts,
        workspace,
        out,
        scale=scale,
        tiling=tiling,
        num_programs=latent_decode_programs(device, tiling),
        split_keys=split_keys,
    )


def _latent_tiles_launch(
    rows: CachedRows, absorbed: Tensor, cache: Tensor, out: Tensor, scale: float
) -> Callable[[], None]:
    device, heads = absorbed.device, absorbed.shape[1]
    tiling = mla_tiling(1 << 20, absorbed.dtype, cache.dtype, device_capability(device))
    tiles = query_tiles(rows.starts, rows.lengths, latent_queries_per_tile(heads, tiling))
    on_device = torch.from_numpy(tiles).to(device)
    return lambda: attend_latent_tiles(
        absorbed,
        cache,
        rows.block_table,
        rows.seq_lens,
        rows.query_start_loc,
        on_device,
        out,
        scale=scale,
        tiling=tiling,
    )


def _flashinfer(rows: CachedRows, queries: Tensor, cache: Tensor, *, is_decode: bool) -> Callable[[], object]:
    """Return a call of FlashInfer's attention on a copy of the cache. Raises `ImportError` without FlashInfer."""
    import flashinfer

    kv_heads, head_dim = cache.shape[2] // 2, cache.shape[3]
    heads = queries.shape[1] // head_dim
    device = queries.device
    pages = -(-rows.lengths // BLOCK)
    indptr = torch.from_numpy(np.cumsum([0, *pages]).astype(np.int32)).to(device)
    indices = torch.cat([rows.block_table[row, :count] for row, count in enumerate(pages.tolist())])
    last_page = torch.from_numpy(((rows.lengths - 1) % BLOCK + 1).astype(np.int32)).to(device)
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    keys, values = cache[:, :, :kv_heads].contiguous(), cache[:, :, kv_heads:].contiguous()
    shaped = queries.view(-1, heads, head_dim)
    if is_decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        sizes = heads, kv_heads, head_dim, BLOCK
        wrapper.plan(indptr, indices, last_page, *sizes, q_data_type=queries.dtype, kv_data_type=cache.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        sizes = heads, kv_heads, head_dim, BLOCK
        wrapper.plan(rows.query_start_loc, indptr, indices, last_page, *sizes, causal=True, q_data_type=queries.dtype)
    return lambda: wrapper.run(shaped, (keys, values))


QWEN3 = {"heads": 32, "kv_heads": 8, "head_dim": 128}
QWEN3_MOE = {"heads": 32, "kv_heads": 4, "head_dim": 128}
GPT_OSS = {"heads": 64, "kv_heads": 8, "head_dim": 64, "has_sinks": True}
DEEPSEEK = {"heads": 128, "rank": 512, "rotated": 64}
SMALL_HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 16}
SMALL_LATENT = {"heads": 4, "rank": 16, "rotated": 8}
SMALL_DECODES = [(299, 1), (20, 1)]
SMALL_TILES = [(20, 6), (0, 9)]

CASES = [
    *(
        KernelCase(
            "attend_decodes",
            f"{count} x {context}, {name}",
            attention,
            heads | {"rows": [(context - 1, 1)] * count},
            SMALL_HEADS | {"rows": SMALL_DECODES, "is_fp8": False} | ({"window": 16} if "window" in heads else {}),
        )
        for count, context, name, heads in [
            (1, 1024, "32/8 x 128", QWEN3),
            (32, 1024, "32/8 x 128", QWEN3),
            (256, 1024, "32/8 x 128", QWEN3),
            (1, 32_768, "32/8 x 128", QWEN3),
            (32, 1024, "32/4 x 128", QWEN3_MOE),
            (32, 1024, "64/8 x 64, sinks", GPT_OSS),
            (32, 1024, "64/8 x 64, sinks, window 128", GPT_OSS | {"window": 128}),
            (32, 1024, "32/8 x 128, FP8 cache", QWEN3 | {"is_fp8": True}),
        ]
    ),
    *(
        KernelCase(
            "attend_tiles",
            name,
            attention,
            heads | {"rows": rows},
            SMALL_HEADS | {"rows": SMALL_TILES} | ({"window": 16} if "window" in heads else {}),
        )
        for name, heads, rows in [
            ("prompt of 8192, 32/8 x 128", QWEN3, [(0, 8192)]),
            ("2048 behind 6144, 32/8 x 128", QWEN3, [(6144, 2048)]),
            ("8 prompts of 1000, 32/8 x 128", QWEN3, [(0, 1000)] * 8),
            ("31 decodes of 1024 and 256 behind 512, 32/8 x 128", QWEN3, [(1023, 1)] * 31 + [(512, 256)]),
            ("prompt of 8192, 64/8 x 64, sinks, window 128", GPT_OSS | {"window": 128}, [(0, 8192)]),
        ]
    ),
    *(
        KernelCase(
            "attend_latent_decodes",
            f"{count} x {context}, 128 x (512 + 64)",
            latent_attention,
            DEEPSEEK | {"rows": [(context - 1, 1)] * count},
            SMALL_LATENT | {"rows": SMALL_DECODES},
        )
        for count, context in [(1, 1024), (32, 1024)]
    ),
    KernelCase(
        "write_latents",
        "256 tokens, 128 x (128 + 64), rank 512",
        write_latent_rows,
        {"tokens": 256, "heads": 128, "plain": 128, "rank": 512, "rotated": 64},
        {"tokens": 3, "heads": 2, "plain": 4, "rank": 16, "rotated": 8},
    ),
    KernelCase(
        "attend_latent_tiles",
        "prompt of 1024, 128 x (512 + 64)",
        latent_attention,
        DEEPSEEK | {"rows": [(0, 1024)]},
        SMALL_LATENT | {"rows": SMALL_TILES},
    ),
]
