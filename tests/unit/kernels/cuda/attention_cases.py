"""Batches for tests of the attention kernels, and the plainest way to compute the same, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class PagedBatch:
    """Metadata of a batch as the kernels take it: int32."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    def slots(self, row: int) -> list[int]:
        """Return the slots of a row's cached tokens, in units of tokens of `block_size`."""
        return self._slots[row]

    _slots: list[list[int]]


def paged_batch(rows: list[tuple[int, int]], block_size: int, seed: int = 0) -> PagedBatch:
    """Make a batch of rows (cached tokens, queries) with shuffled blocks. A row (0, 0) is padding.

    The table has more columns than blocks; those behind a row's blocks name the last block, of which no row has a slot.
    """
    random = np.random.default_rng(seed)
    contexts = [cached + queries for cached, queries in rows]
    sizes = [-(-context // block_size) for context in contexts]
    ids = random.permutation(sum(sizes) + 2).tolist()
    num_blocks = len(ids) + 1
    table = torch.full((len(rows), max(sizes) + 2), num_blocks - 1, dtype=torch.int32)
    slots = []
    for row, (context, size) in enumerate(zip(contexts, sizes, strict=True)):
        mine = [ids.pop() for _ in range(size)]
        table[row, :size] = torch.tensor(mine, dtype=torch.int32)
        slots.append([mine[p // block_size] * block_size + p % block_size for p in range(context)])
    starts = torch.tensor([0] + [queries for _, queries in rows]).cumsum(0).int()
    return PagedBatch(table, torch.tensor(contexts, dtype=torch.int32), starts, num_blocks, slots)


def poisoned_cache(batch: PagedBatch, *block: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random keys and values in blocks of this shape, and NaN where no row has a token."""
    cache = torch.full((batch.num_blocks, *block), torch.nan, dtype=dtype)
    tokens = cache.view(-1, *block[1:])
    for row in range(len(batch.seq_lens)):
        tokens[batch.slots(row)] = torch.randn(len(batch.slots(row)), *block[1:]).to(dtype)
    return cache


def ordered_matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Multiply as numpy's matmul does, but sum in one order for every row of `a`: numpy's rounding depends on where in
    the matrix a row is, that of a GPU's tensor cores does not."""
    total = np.zeros((a.shape[0], b.shape[1]), dtype)
    for k in range(a.shape[1]):
        total += a[:, k, None].astype(dtype) * b[k].astype(dtype)
    return total


def naive_attention(
    queries: torch.Tensor,
    cache: torch.Tensor,
    batch: PagedBatch,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the attention of queries [num_tokens, num_heads * head_dim], one query and head at a time."""
    num_kv_heads, head_dim = cache.shape[2] // 2, cache.shape[3]
    split = queries.double().unflatten(1, (-1, head_dim))
    group = split.shape[1] // num_kv_heads
    out = torch.full_like(split, torch.nan)
    for row in range(len(batch.seq_lens)):
        keys_values = cache.flatten(0, 1)[batch.slots(row)].double()
        first, last = batch.query_start_loc[row : row + 2].tolist()
        for token in range(first, last):
            position = len(keys_values) - (last - token)
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            for head in range(split.shape[1]):
                keys = keys_values[seen, head // group]
                values = keys_values[seen, num_kv_heads + head // group]
                scores = keys @ split[token, head] / math.sqrt(head_dim)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                out[token, head] = torch.softmax(scores, 0)[: len(values)] @ values
    return out.flatten(1)
