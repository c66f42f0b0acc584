"""Attention over the paged cache, in plain torch.

A batch is planned once for all layers that share a window: which blocks each row reads, how rows are grouped, and
masks. Rows that compute one token are computed together, padded to the longest of their group; the others one by one.
Query heads that share a key are kept together, so keys and values are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.models.batch import Batch

__all__ = ["AttentionPlan", "attend", "plan_attention"]

SMALL_CONTEXT = 8
"""Blocks; rows with no more than this are not worth a group of their own."""

MAX_QUERIES = 256
"""Queries of a long row that are computed together: bounds the mask, and skips keys that none of them may see."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows with one query each, of similar length."""

    rows: Tensor | None
    """int64 [group size] indices of the rows; None: all rows that have one query"""
    size: int
    block_ids: Tensor
    """int64 [group size * blocks] what to read, the same number of blocks for each row"""
    num_keys: int
    """Of the longest row."""
    mask: Tensor | None
    """[group size, 1, 1, num_keys] to add to the scores; None: all rows see all keys"""


@dataclass(frozen=True, slots=True)
class FreshRow:
    """A row that sees nothing but the tokens of this step: tokens `start` to `end` of the batch."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ContinuedRow:
    """A row with cached context before the tokens `start` to `end` of the batch, or with a window."""

    start: int
    end: int
    block_ids: Tensor
    """int64 [blocks] what to read"""
    num_keys: int
    """Up to and with the last token of the row."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    num_decodes: int
    decodes: list[DecodeGroup]
    prefills: list[FreshRow | ContinuedRow]
    window: int | None
    mask: Tensor | None
    """[queries, keys] to add to the scores of a continued row; aligned at the lower right: the last query sees the last
    key. What a query may see depends on its distance from a key alone, so parts of this serve every row."""


def plan_attention(batch: Batch, *, window: int | None, block_size: int, dtype: torch.dtype) -> AttentionPlan:
    prefills = list(_plan_prefills(batch, window, block_size))
    continued = [row for row in prefills if isinstance(row, ContinuedRow)]
    return AttentionPlan(
        num_decodes=batch.num_decodes,
        decodes=_plan_decodes(batch, window, block_size, dtype),
        prefills=prefills,
        window=window,
        mask=_shared_mask(continued, window, dtype, batch.block_table.device) if continued else None,
    )


def attend(queries: Tensor, keys_values: Tensor, cache: Tensor, plan: AttentionPlan) -> Tensor:
    """As `Kernels.attention`."""
    out = queries.new_empty(queries.shape)  # [num_tokens, num_heads, head_dim]
    for group in plan.decodes:
        if group.rows is None:
            out[: plan.num_decodes] = _attend_group(queries[: plan.num_decodes], cache, group)
        else:
            out[group.rows] = _attend_group(queries[group.rows], cache, group)
    for row in plan.prefills:
        mine = queries[row.start : row.end]
        if isinstance(row, FreshRow):
            _attend_row(mine, keys_values[row.start : row.end], None, out[row.start : row.end])
        else:
            _attend_continued(mine, cache, row, plan, out[row.start : row.end])
    return out.flatten(1)


def _attend_group(queries: Tensor, cache: Tensor, group: DecodeGroup) -> Tensor:
    """[group size, num_heads, head_dim]"""
    num_kv_heads, head_dim = cache.shape[2] // 2, cache.shape[3]
    context = cache.index_select(0, group.block_ids).view(group.size, -1, 2, num_kv_heads, head_dim)
    keys, values = context[:, : group.num_keys].permute(2, 0, 3, 1, 4)  # [size, num_kv_heads, num_keys, head_dim]
    # the heads that share a key are the queries of that key
    folded = queries.reshape(group.size, num_kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask)
    return out.reshape(queries.shape)


def _attend_continued(queries: Tensor, cache: Tensor, row: ContinuedRow, plan: AttentionPlan, out: Tensor) -> None:
    assert plan.mask is not None
    context = cache.index_select(0, row.block_ids).flatten(0, 1)  # [keys, 2 * num_kv_heads, head_dim]
    for first, last, low, high in _pieces(row.end - row.start, row.num_keys, plan.window):
        mask = plan.mask[first - last :, low - high :]
        _attend_row(queries[first:last], context[low:high], mask, out[first:last])


def _attend_row(queries: Tensor, keys_values: Tensor, mask: Tensor | None, out: Tensor) -> None:
    """queries, out [n, num_heads, head_dim], keys_values [m, 2 * num_kv_heads, head_dim]; no mask: causal, n = m"""
    num_kv_heads = keys_values.shape[1] // 2
    grouped = queries.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    shared = (-1, grouped.shape[1], -1, -1)  # the heads of a group see the same memory
    keys, values = keys_values.transpose(0, 1)[:, None].chunk(2)  # [num_kv_heads, 1, m, head_dim]
    result = F.scaled_dot_product_attention(
        grouped, keys.expand(shared), values.expand(shared), attn_mask=mask, is_causal=mask is None
    )  # [num_kv_heads, heads of a group, n, head_dim]
    out.unflatten(1, (num_kv_heads, -1)).copy_(result.permute(2, 0, 1, 3))


def _plan_decodes(batch: Batch, window: int | None, block_size: int, dtype: torch.dtype) -> list[DecodeGroup]:
    """Groups in which no row is padded to more than twice its blocks, unless they are few."""
    if batch.num_decodes == 0:
        return []
    contexts = batch.context_lens[: batch.num_decodes]
    starts = [_first_block(context - 1, window, block_size) for context in contexts]
    num_keys = [context - start * block_size for context, start in zip(contexts, starts, strict=True)]
    sizes = [max(-(-keys // block_size), SMALL_CONTEXT) for keys in num_keys]
    if max(sizes) <= 2 * min(sizes):
        return [_plan_group(batch, None, starts, num_keys, window, block_size, dtype)]
    groups: list[list[int]] = []
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        if groups and sizes[groups[-1][0]] <= 2 * sizes[row]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [_plan_group(batch, sorted(rows), starts, num_keys, window, block_size, dtype) for rows in groups]


def _plan_group(
    batch: Batch,
    rows: list[int] | None,
    starts: list[int],
    num_keys: list[int],
    window: int | None,
    block_size: int,
    dtype: torch.dtype,
) -> DecodeGroup:
    device = batch.block_table.device
    table = batch.block_table[: batch.num_decodes]
    picked = None
    if rows is not None:
        picked = torch.tensor(rows, device=device)
        table = table[picked]
        starts, num_keys = [starts[row] for row in rows], [num_keys[row] for row in rows]
    longest = max(num_keys)
    num_blocks = -(-longest // block_size)
    if any(starts):
        columns = torch.tensor(starts, device=device)[:, None] + torch.arange(num_blocks, device=device)
        block_ids = table.gather(1, columns.clamp_(max=table.shape[1] - 1))
    else:
        block_ids = table[:, :num_blocks]
    return DecodeGroup(
        rows=picked,
        size=len(num_keys),
        block_ids=block_ids.reshape(-1),
        num_keys=longest,
        mask=_length_mask(num_keys, window, dtype, device),
    )


def _length_mask(num_keys: list[int], window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Row i sees the last `window` of its first `num_keys[i]` keys."""
    longest = max(num_keys)
    if min(num_keys) == longest and (window is None or longest <= window):
        return None
    ends = torch.tensor(num_keys, device=device)[:, None]
    keys = torch.arange(longest, device=device)
    hidden = keys >= ends
    if window is not None:
        hidden |= keys < ends - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)[:, None, None]


def _plan_prefills(batch: Batch, window: int | None, block_size: int) -> Iterator[FreshRow | ContinuedRow]:
    start = batch.num_decodes
    for row in range(batch.num_decodes, len(batch.query_lens)):
        context, queries = batch.context_lens[row], batch.query_lens[row]
        if context == queries and (window is None or queries <= window):
            yield FreshRow(start, start + queries)
        else:
            first = _first_block(context - queries, window, block_size)
            yield ContinuedRow(
                start=start,
                end=start + queries,
                block_ids=batch.block_table[row, first : -(-context // block_size)],
                num_keys=context - first * block_size,
            )
        start += queries


def _first_block(position: int, window: int | None, block_size: int) -> int:
    """The block with the first position that `position` sees."""
    return 0 if window is None else max(position - window + 1, 0) // block_size


def _pieces(num_queries: int, num_keys: int, window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Cut a row into (first query, behind the last, first key that the first one sees, behind the last key)."""
    for first in range(0, num_queries, MAX_QUERIES):
        last = min(first + MAX_QUERIES, num_queries)
        high = num_keys - (num_queries - last)
        low = 0 if window is None else max(high - (last - first) - window + 1, 0)
        yield first, last, low, high


def _shared_mask(rows: list[ContinuedRow], window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Large enough for every piece of every row."""
    pieces = [piece for row in rows for piece in _pieces(row.end - row.start, row.num_keys, window)]
    num_queries = max(last - first for first, last, _, _ in pieces)
    num_keys = max(high - low for _, _, low, high in pieces)
    queries_back = torch.arange(num_queries - 1, -1, -1, device=device)[:, None]
    distance = torch.arange(num_keys - 1, -1, -1, device=device) - queries_back  # how far a key is before a query
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)
