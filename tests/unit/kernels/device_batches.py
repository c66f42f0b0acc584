"""Batches for tests of the torch backend."""

from __future__ import annotations

import torch

from eagleray.kernels.torch.attention import DeviceBatch


def random_batch(rows: list[tuple[int, int]], block_size: int) -> DeviceBatch:
    """Make a batch of rows (cached tokens, tokens to compute) with shuffled blocks."""
    rows = sorted(rows, key=lambda row: row[1] != 1)
    contexts = [cached + queries for cached, queries in rows]
    sizes = [-(-context // block_size) for context in contexts]
    blocks = torch.randperm(sum(sizes) + 3).tolist()
    table = torch.zeros(len(rows), max(sizes), dtype=torch.long)
    for row, size in enumerate(sizes):
        table[row, :size] = torch.tensor([blocks.pop() for _ in range(size)])
    positions = [torch.arange(context - queries, context) for context, (_, queries) in zip(contexts, rows, strict=True)]
    slots = [table[row, p // block_size] * block_size + p % block_size for row, p in enumerate(positions)]
    return DeviceBatch(
        token_ids=torch.cat(positions),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        block_table=table,
        seq_lens=contexts,
        query_lens=[queries for _, queries in rows],
        num_decodes=sum(queries == 1 for _, queries in rows),
    )
