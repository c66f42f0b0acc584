"""Attention of prompts by FlashAttention-3, where it is installed (Shah et al. 2024, arXiv 2407.08608)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

from torch import Tensor

MODULE = "flash_attn_interface"

CAPABILITY = (9, 0)
"""Compute capability of the GPUs that it supports: Hopper's."""


def is_installed() -> bool:
    return importlib.util.find_spec(MODULE) is not None


class PromptAttention:
    """Attention of the rows with several queries, which follow the others in a batch. For windows see
    `AttentionParams`."""

    def __init__(self) -> None:
        self._attend: Callable[..., Tensor] = importlib.import_module(MODULE).flash_attn_with_kvcache

    def __call__(
        self,
        queries: Tensor,
        cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        out: Tensor,
        *,
        num_decodes: int,
        num_tokens: int,
        window: int | None,
    ) -> None:
        """Write the attention of the rows from `num_decodes` on to `out`.

        queries, out: [num_tokens, num_heads * head_dim]; cache: [num_blocks, block_size, 2 * num_kv_heads, head_dim];
        the others int32 on the device: block_table [num_rows, blocks], seq_lens [num_rows], query_start_loc
        [num_rows + 1]. `num_tokens` are those of the batch without padding.
        """
        num_kv_heads, head_dim = cache.shape[2] // 2, cache.shape[3]
        # each of the first rows has one token, so the next row begins at their number
        starts = query_start_loc[num_decodes:] - num_decodes
        result = self._attend(
            queries[num_decodes:num_tokens].unflatten(1, (-1, head_dim)),
            cache[:, :, :num_kv_heads],
            cache[:, :, num_kv_heads:],
            cache_seqlens=seq_lens[num_decodes:],
            page_table=block_table[num_decodes:],
            cu_seqlens_q=starts,
            max_seqlen_q=num_tokens - num_decodes,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )  # [tokens of these rows, num_heads, head_dim]
        out[num_decodes:num_tokens] = result.flatten(1)
