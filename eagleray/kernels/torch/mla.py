"""DeepSeek's multi-head latent attention (MLA) in plain torch: one cached vector of a token serves all heads.

A cached vector is the normalized latent, followed by the rotated part of the key, which all heads share. A head's keys
and values are products of the latent with two matrices of the head. Rows that compute one token multiply their query
and their output with these matrices instead ("absorb"), so that keys and values need not be computed; other rows
compute the keys and values that they see, for a few heads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.params import MLAParams
from eagleray.kernels.torch.attention import (
    MAX_QUERIES,
    AttentionMetadata,
    DecodeGroup,
    ForwardContext,
    write_cache,
)
from eagleray.kernels.torch.functional import rms_norm, rotate

EXPANDED_BYTES = 64 << 20
"""Keys and values that are computed at a time, unless a single head needs more."""


def mla_cache_block(block_size: int, size: int) -> tuple[int, ...]:
    """See `KernelBackend.mla_cache_block`."""
    return block_size, size


class LatentAttention:
    """See `KernelBackend.mla_attention`. A layer's cache is [num_blocks, block_size, rank + rotated_dim]."""

    def __init__(self, params: MLAParams) -> None:
        self._params = params
        self._rank = len(params.norm)

    def storage(self) -> list[Tensor]:
        return self._params.storage()

    def __call__(self, queries: Tensor, latents: Tensor, cache: Tensor, context: ForwardContext) -> Tensor:
        params, rank = self._params, self._rank
        queries = queries.unflatten(1, (params.num_heads, -1))  # [num_tokens, num_heads, plain_dim + rotated_dim]
        rotated = queries[..., params.plain_dim :]
        rotate(rotated, context.cos, context.sin, out=rotated)
        queries = queries.to(cache.dtype)
        normed = rms_norm(latents[:, :rank], params.norm, params.norm_eps)
        cached = torch.cat((normed, latents[:, rank:]), dim=1)  # [num_tokens, rank + rotated_dim]
        key = cached[:, None, rank:]
        rotate(key, context.cos, context.sin, out=key)
        cached = cached.to(cache.dtype)
        write_cache(cached, cache, context.slot_mapping)
        metadata = context.metadata[None]
        out = queries.new_empty(len(queries), params.num_heads, params.value_dim)
        if metadata.num_decodes:
            out[: metadata.num_decodes] = self._attend_decodes(queries[: metadata.num_decodes], cache, metadata)
        for row in metadata.prefills:
            mine, result = queries[row.start : row.end], out[row.start : row.end]
            if row.block_ids is None:
                self._attend_row(mine, cached[row.start : row.end], None, result)
            else:
                seen = cache.index_select(0, row.block_ids).flatten(0, 1)[: row.num_keys]
                self._attend_row(mine, seen, metadata.mask, result)
        return out.flatten(1)

    def _attend_decodes(self, queries: Tensor, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Compute rows with one query: [num_decodes, num_heads, plain_dim + rotated_dim] -> [.., value_dim]."""
        plain, rotated = queries.split([self._params.plain_dim, self._params.rotated_dim], dim=-1)
        absorbed = torch.bmm(plain.transpose(0, 1), self._params.keys).transpose(0, 1)
        queries = torch.cat((absorbed, rotated), dim=-1)  # [num_decodes, num_heads, rank + rotated_dim]
        if metadata.order is not None:
            queries = queries.index_select(0, metadata.order)
        groups = [self._attend_group(queries[group.start : group.end], cache, group) for group in metadata.decodes]
        latents = torch.cat(groups)  # [num_decodes, num_heads, rank]
        if metadata.order is not None:
            latents = torch.empty_like(latents).index_copy_(0, metadata.order, latents)
        return torch.bmm(latents.transpose(0, 1), self._params.values.transpose(1, 2)).transpose(0, 1)

    def _attend_group(self, queries: Tensor, cache: Tensor, group: DecodeGroup) -> Tensor:
        """Return for each head the weighted sum of the latents that it sees, [group size, num_heads, rank]."""
        seen = cache.index_select(0, group.block_ids).view(len(queries), 1, -1, cache.shape[-1])[:, :, : group.num_keys]
        # the heads are the queries of the one key that they share; values as wide as keys, for torch's fast kernels
        out = F.scaled_dot_product_attention(
            queries[:, None], seen, seen, attn_mask=group.mask, scale=self._params.scale
        )
        return out[:, 0, :, : self._rank]

    def _attend_row(self, queries: Tensor, seen: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """Compute one row: `queries` [n, num_heads, ..] of the last n of the cached vectors `seen` [m, rank +
        rotated_dim], `out` [n, num_heads, value_dim]. Without a mask it is causal and n = m."""
        params = self._params
        width = max(params.plain_dim + params.rotated_dim, params.value_dim)  # torch's fast kernels need one width
        queries = _pad(queries.transpose(0, 1), width)
        for part in self._parts(len(seen), width):
            keys, values = (_pad(expanded, width) for expanded in self._expand(seen, part))
            for piece, high in _pieces(len(out), len(seen), is_whole=mask is None):
                result = F.scaled_dot_product_attention(
                    queries[None, part, piece],
                    keys[None, :, :high],
                    values[None, :, :high],
                    # aligned at the lower right; CUDA's kernels require it to be contiguous
                    attn_mask=None if mask is None else mask[piece.start - piece.stop :, -high:].contiguous(),
                    is_causal=mask is None,
                    scale=params.scale,
                )  # [1, heads of the part, queries of the piece, width]
                out[piece, part] = result[0, ..., : params.value_dim].transpose(0, 1)

    def _expand(self, seen: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values of some heads, [heads, m, plain_dim + rotated_dim] and [heads, m, value_dim]."""
        latents, shared = seen[:, : self._rank], seen[:, None, self._rank :]
        plain, values = (
            F.linear(latents, matrices[part].flatten(0, 1)).unflatten(1, (-1, matrices.shape[1]))  # [m, heads, ..]
            for matrices in (self._params.keys, self._params.values)
        )
        keys = torch.cat((plain, shared.expand(-1, plain.shape[1], -1)), dim=-1)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _parts(self, num_keys: int, width: int) -> Iterator[slice]:
        """Yield slices of the heads that fit into `EXPANDED_BYTES`."""
        bytes_of_head = num_keys * 3 * width * self._params.keys.itemsize
        at_once = max(1, EXPANDED_BYTES // bytes_of_head)
        for first in range(0, self._params.num_heads, at_once):
            yield slice(first, min(first + at_once, self._params.num_heads))


def _pieces(num_queries: int, num_keys: int, *, is_whole: bool) -> Iterator[tuple[slice, int]]:
    """Yield (queries, end of the keys that they see)."""
    at_once = num_queries if is_whole else MAX_QUERIES
    for first in range(0, num_queries, at_once):
        last = min(first + at_once, num_queries)
        yield slice(first, last), num_keys - (num_queries - last)


def _pad(x: Tensor, width: int) -> Tensor:
    """Pad the features with zeros, which change no score and no value before them."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
