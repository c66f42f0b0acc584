"""Attention over the paged cache, in plain torch.

The metadata of a batch is built once for all layers that share a window: the blocks that each row reads, the groups of
rows, and masks. Rows that compute one token are computed together, padded to the longest of their group; the others one
by one. Query heads that share a key are kept together, so keys and values are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.forward_batch import ForwardBatch, Int32Array
from eagleray.kernels.params import AttentionParams
from eagleray.kernels.storage import contiguous, memory_of
from eagleray.kernels.torch.functional import rms_norm, rotate

GROUP_BYTES = 2 << 20
"""Keys and values gathered at a time for rows with one query: an amount that stays in a processor's cache."""

SMALL_CONTEXT = 8
"""Blocks. Rows with at most this number count as equally long."""

MAX_QUERIES = 256
"""Queries of a long row that are computed together. It bounds the mask and skips keys that none of them may see."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A `ForwardBatch` on its device: int64 tensors, and lists of the numbers that the host computes with."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: list[int]
    query_lens: list[int]
    """[num_rows] tokens of each row computed in this step"""
    num_decodes: int

    @classmethod
    def of(cls, batch: ForwardBatch, device: torch.device) -> DeviceBatch:
        def tensor(array: Int32Array) -> Tensor:
            return torch.from_numpy(array).to(device, torch.int64)

        token_ids = tensor(batch.token_ids)
        if batch.last_tokens is not None:
            sampled = batch.last_tokens[(-1 - token_ids).clamp_(min=0)]
            token_ids = torch.where(token_ids < 0, sampled.to(torch.int64), token_ids)
        return cls(
            token_ids=token_ids,
            positions=tensor(batch.positions),
            slot_mapping=tensor(batch.slot_mapping),
            block_table=tensor(batch.block_table),
            seq_lens=batch.seq_lens.tolist(),
            query_lens=(batch.query_start_loc[1:] - batch.query_start_loc[:-1]).tolist(),
            num_decodes=batch.num_decodes,
        )


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows with one query each that are computed together: `start` to `end` in the metadata's order."""

    start: int
    end: int
    block_ids: Tensor
    """int64 [group size * blocks] blocks to read, the same number for each row"""
    num_keys: int
    """Keys of the longest row."""
    mask: Tensor | None
    """[group size, 1, 1, num_keys] to add to the scores; None: all rows see all keys"""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A row with several queries: tokens `start` to `end` of the batch."""

    start: int
    end: int
    block_ids: Tensor | None
    """int64 [blocks] blocks to read. None if the row sees nothing but its tokens of this step."""
    num_keys: int
    """Keys from the first of these blocks up to and including the row's last token."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    num_decodes: int
    order: Tensor | None
    """int64 [num_decodes] rows with one query in order of length, if their lengths differ much"""
    decodes: list[DecodeGroup]
    prefills: list[PrefillRow]
    window: int | None
    mask: Tensor | None
    """[queries, keys] to add to the scores of rows that read blocks, aligned at the lower right: the last query sees
    the last key. Whether a query sees a key depends on their distance alone, so parts of this mask serve every row."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """State of one batch that all layers share."""

    cos: Tensor
    sin: Tensor
    """[num_tokens, 1, head_dim], see `Rope.angles`"""
    slot_mapping: Tensor
    """[num_tokens] slots of the tokens' keys and values"""
    metadata: Mapping[int | None, AttentionMetadata]
    """Metadata by the layer's window."""


class SelfAttention:
    """See `KernelBackend.self_attention`. A layer's cache is [num_blocks, block_size, 2 * num_kv_heads, head_dim]."""

    def __init__(self, params: AttentionParams) -> None:
        self._params = replace(params, q_norm=None, k_norm=None, sinks=contiguous(params.sinks))
        self._qk_norm: Tensor | None = None
        if params.q_norm is not None and params.k_norm is not None:
            weights = [params.q_norm] * params.num_heads + [params.k_norm] * params.num_kv_heads
            self._qk_norm = torch.stack(weights)  # [heads of queries and keys, head_dim]

    def storage(self) -> list[Tensor]:
        return memory_of(self._qk_norm, self._params.sinks)

    def __call__(self, qkv: Tensor, cache: Tensor, context: ForwardContext) -> Tensor:
        params = self._params
        split = qkv.unflatten(1, (-1, params.head_dim))  # [num_tokens, heads of q, k and v, head_dim]
        queries_keys = split[:, : params.num_heads + params.num_kv_heads]
        normed = queries_keys
        if self._qk_norm is not None:
            normed = rms_norm(queries_keys, self._qk_norm, params.norm_eps)
        rotate(normed, context.cos, context.sin, out=queries_keys)
        queries, keys_values = split[:, : params.num_heads], split[:, params.num_heads :]
        write_cache(keys_values, cache, context.slot_mapping)
        return attend(queries, keys_values, cache, context.metadata[params.window], params.sinks)


def write_cache(keys_values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write keys and values [num_tokens, 2 * num_kv_heads, head_dim] to their slots of a layer's cache."""
    if keys_values.dtype == torch.float16:
        # an overflow must stay its own request's: other rows read this block as padding, and 0 x inf is NaN
        keys_values = keys_values.nan_to_num()
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, keys_values)


def build_attention_metadata(batch: DeviceBatch, cache: Tensor, window: int | None) -> AttentionMetadata:
    """Build what all layers with this window share in one batch. `cache` is that of any layer."""
    order, decodes = _group_decodes(batch, cache, window)
    prefills = list(_prefill_rows(batch, cache.shape[1], window))
    continued = [row for row in prefills if row.block_ids is not None]
    return AttentionMetadata(
        num_decodes=batch.num_decodes,
        order=order,
        decodes=decodes,
        prefills=prefills,
        window=window,
        mask=_shared_mask(continued, cache, window) if continued else None,
    )


def attend(
    queries: Tensor, keys_values: Tensor, cache: Tensor, metadata: AttentionMetadata, sinks: Tensor | None = None
) -> Tensor:
    """Return the attention of queries [num_tokens, num_heads, head_dim] over the cached context of their rows,
    [num_tokens, num_heads * head_dim]. `keys_values` (as in `write_cache`) are in the cache already; `sinks`: see
    `AttentionParams`."""
    out = queries.new_empty(queries.shape)  # [num_tokens, num_heads, head_dim]
    if metadata.num_decodes:
        _attend_decodes(queries[: metadata.num_decodes], cache, metadata, sinks, out[: metadata.num_decodes])
    for row in metadata.prefills:
        mine, result = queries[row.start : row.end], out[row.start : row.end]
        if row.block_ids is None:
            _attend_row(mine, keys_values[row.start : row.end], None, sinks, result)
        else:
            context = cache.index_select(0, row.block_ids).flatten(0, 1)  # [keys, 2 * num_kv_heads, head_dim]
            _attend_continued(mine, context, row.num_keys, metadata, sinks, result)
    return out.flatten(1)


def _attend_decodes(
    queries: Tensor, cache: Tensor, metadata: AttentionMetadata, sinks: Tensor | None, out: Tensor
) -> None:
    if metadata.order is None:
        for group in metadata.decodes:
            out[group.start : group.end] = _attend_group(queries[group.start : group.end], cache, group, sinks)
    else:
        queries = queries.index_select(0, metadata.order)
        results = [_attend_group(queries[group.start : group.end], cache, group, sinks) for group in metadata.decodes]
        out.index_copy_(0, metadata.order, torch.cat(results))


def _attend_group(queries: Tensor, cache: Tensor, group: DecodeGroup, sinks: Tensor | None) -> Tensor:
    """Return [group size, num_heads, head_dim]."""
    size, num_kv_heads, head_dim = len(queries), cache.shape[2] // 2, cache.shape[3]
    context = cache.index_select(0, group.block_ids).view(size, -1, 2, num_kv_heads, head_dim)
    keys, values = context[:, : group.num_keys].permute(2, 0, 3, 1, 4)  # [size, num_kv_heads, num_keys, head_dim]
    # the heads that share a key are the queries of that key
    folded = queries.reshape(size, num_kv_heads, -1, head_dim)
    if sinks is None:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask)
    else:
        out = attend_with_sinks(folded, keys, values, group.mask, sinks.view(num_kv_heads, -1))
    return out.reshape(queries.shape)


def _attend_continued(
    queries: Tensor,
    context: Tensor,
    num_keys: int,
    metadata: AttentionMetadata,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Compute a row that sees more than its tokens of this step. `context`: the keys and values of its blocks."""
    assert metadata.mask is not None
    for first, last, low, high in _pieces(len(queries), num_keys, metadata.window):
        mask = metadata.mask[first - last :, low - high :].contiguous()  # CUDA's kernels require alignment
        _attend_row(queries[first:last], context[low:high], mask, sinks, out[first:last])


def _attend_row(queries: Tensor, keys_values: Tensor, mask: Tensor | None, sinks: Tensor | None, out: Tensor) -> None:
    """Compute one row: `queries` and `out` [n, num_heads, head_dim], `keys_values` [m, 2 * num_kv_heads, head_dim].
    Without a mask it is causal and n = m."""
    num_kv_heads = keys_values.shape[1] // 2
    grouped = queries.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    shared = (-1, grouped.shape[1], -1, -1)  # the heads of a group read the same memory
    keys, values = keys_values.transpose(0, 1)[:, None].chunk(2)  # [num_kv_heads, 1, m, head_dim]
    if sinks is None:
        result = F.scaled_dot_product_attention(
            grouped, keys.expand(shared), values.expand(shared), attn_mask=mask, is_causal=mask is None
        )
    elif mask is None:
        result = _attend_causally_with_sinks(grouped, keys, values, sinks.view(num_kv_heads, -1, 1))
    else:
        result = attend_with_sinks(grouped, keys, values, mask, sinks.view(num_kv_heads, -1, 1))
    # [num_kv_heads, heads of a group, n, head_dim]
    out.unflatten(1, (num_kv_heads, -1)).copy_(result.permute(2, 0, 1, 3))


# A sink is one more key in front of the others, with a value of zeros. Queries and keys get one more feature, in which
# this key alone is not 0. So torch's fast kernels serve models with sinks, too.

SPARE_FEATURES = 8
"""Features that are added. CUDA's kernels require multiples of this number."""


def attend_with_sinks(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
    """Like torch's attention with sinks: queries [.., n, head_dim]; keys and values [.., m, head_dim], which are
    broadcast to the queries' heads; `sinks` of every query, broadcast to [.., n]."""
    if mask is not None:
        mask = F.pad(mask, (1, 0))
    return F.scaled_dot_product_attention(
        *_with_sinks(queries, keys, values, sinks), attn_mask=mask, scale=queries.shape[-1] ** -0.5
    )[..., : queries.shape[-1]]


def _attend_causally_with_sinks(queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor) -> Tensor:
    """Like `attend_with_sinks` with a causal mask, n = m. As one more key is in front of the keys, one more query in
    front of the others keeps each query aligned with its own key."""
    queries, keys, values = _with_sinks(F.pad(queries, (0, 0, 1, 0)), keys, values, sinks)
    size = queries.shape[-1] - SPARE_FEATURES
    out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=size**-0.5)
    return out[..., 1:, :size]


def _with_sinks(queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = queries.shape[-1]
    queries = F.pad(queries, (0, SPARE_FEATURES))
    queries[..., size] = sinks.to(queries.dtype) * size**0.5
    keys, values = (F.pad(x, (0, SPARE_FEATURES, 1, 0)) for x in (keys, values))
    keys[..., 0, size] = 1
    shared = (*queries.shape[:-2], -1, -1)  # expanded last, so that heads of a group read the same memory
    return queries, keys.expand(shared), values.expand(shared)


def _group_decodes(batch: DeviceBatch, cache: Tensor, window: int | None) -> tuple[Tensor | None, list[DecodeGroup]]:
    """Return (order, groups) of the rows with one query such that none is padded to more than twice its blocks, unless
    these are few."""
    if batch.num_decodes == 0:
        return None, []
    block_size, device = cache.shape[1], batch.block_table.device
    contexts = batch.seq_lens[: batch.num_decodes]
    firsts = [_first_block(context - 1, window, block_size) for context in contexts]
    num_keys = [context - first * block_size for context, first in zip(contexts, firsts, strict=True)]
    sizes = [max(-(-keys // block_size), SMALL_CONTEXT) for keys in num_keys]
    table, order = batch.block_table[: batch.num_decodes], None
    if max(sizes) > 2 * min(sizes):
        rows = sorted(range(len(sizes)), key=lambda row: -sizes[row])
        firsts, num_keys, sizes = ([values[row] for row in rows] for values in (firsts, num_keys, sizes))
        order = torch.tensor(rows, device=device)
        table = table.index_select(0, order)
    max_blocks = GROUP_BYTES // cache[0].nbytes
    groups = []
    for start, end in _cut(sizes, max_blocks):
        ids = _block_ids(table[start:end], firsts[start:end], max(num_keys[start:end]), block_size)
        mask = _length_mask(num_keys[start:end], cache, window)
        groups.append(DecodeGroup(start, end, ids, max(num_keys[start:end]), mask))
    return order, groups


def _cut(sizes: list[int], max_blocks: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows whose numbers of blocks differ at most by a factor of 2, and that have at most `max_blocks`
    with their padding."""
    start = 0
    for end in range(1, len(sizes) + 1):
        longest = max(sizes[start : end + 1])
        full = (end + 1 - start) * longest > max_blocks
        if end == len(sizes) or full or longest > 2 * sizes[end]:
            yield start, end
            start = end


def _block_ids(table: Tensor, firsts: list[int], num_keys: int, block_size: int) -> Tensor:
    """Return [rows * blocks]: the blocks of each row from its entry in `firsts` on, enough for `num_keys`."""
    num_blocks = -(-num_keys // block_size)
    if not any(firsts):
        return table[:, :num_blocks].reshape(-1)
    columns = torch.arange(num_blocks, device=table.device) + torch.tensor(firsts, device=table.device)[:, None]
    return table.gather(1, columns.clamp_(max=table.shape[1] - 1)).view(-1)


def _length_mask(num_keys: list[int], cache: Tensor, window: int | None) -> Tensor | None:
    """Return a mask by which row i sees the last `window` of its first `num_keys[i]` keys, or None if all see all."""
    longest = max(num_keys)
    if min(num_keys) == longest and (window is None or longest <= window):
        return None
    ends = torch.tensor(num_keys, device=cache.device)[:, None]
    keys = torch.arange(longest, device=cache.device)
    hidden = keys >= ends
    if window is not None:
        hidden |= keys < ends - window
    return _additive(hidden, cache)[:, None, None]


def _prefill_rows(batch: DeviceBatch, block_size: int, window: int | None) -> Iterator[PrefillRow]:
    start = batch.num_decodes
    for row in range(batch.num_decodes, len(batch.query_lens)):
        context, queries = batch.seq_lens[row], batch.query_lens[row]
        if context == queries and (window is None or queries <= window):
            yield PrefillRow(start, start + queries, block_ids=None, num_keys=queries)
        else:
            first = _first_block(context - queries, window, block_size)
            block_ids = batch.block_table[row, first : -(-context // block_size)]
            yield PrefillRow(start, start + queries, block_ids=block_ids, num_keys=context - first * block_size)
        start += queries


def _first_block(position: int, window: int | None, block_size: int) -> int:
    """Return the block with the first position that `position` sees."""
    return 0 if window is None else max(position - window + 1, 0) // block_size


def _pieces(num_queries: int, num_keys: int, window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Cut a row into pieces (first query, end of queries, first key that the first query sees, end of keys)."""
    for first in range(0, num_queries, MAX_QUERIES):
        last = min(first + MAX_QUERIES, num_queries)
        high = num_keys - (num_queries - last)
        low = 0 if window is None else max(high - (last - first) - window + 1, 0)
        yield first, last, low, high


def _shared_mask(rows: list[PrefillRow], cache: Tensor, window: int | None) -> Tensor:
    """Return a mask that is large enough for every piece of every row."""
    pieces = [piece for row in rows for piece in _pieces(row.end - row.start, row.num_keys, window)]
    num_queries = max(last - first for first, last, _, _ in pieces)
    num_keys = max(high - low for _, _, low, high in pieces)
    queries_back = torch.arange(num_queries - 1, -1, -1, device=cache.device)[:, None]
    distance = torch.arange(num_keys - 1, -1, -1, device=cache.device) - queries_back  # how far a key is before a query
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return _additive(hidden, cache)


def _additive(hidden: Tensor, cache: Tensor) -> Tensor:
    """Return 0 where a key is visible and minus infinity where it is hidden."""
    return cache.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
