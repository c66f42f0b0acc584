"""Tokens in order of their logits: the highest first, equal ones by token id.

This order is total, so what is taken from its front never depends on the other lines of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Ranking:
    """In plain torch. NaN is above everything."""

    def first(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [n] the first token id of each line of logits [n, vocab_size], and [n] its logit."""
        token_ids = logits.argmax(dim=-1)
        return token_ids, logits.gather(1, token_ids[:, None])[:, 0]

    def top(self, logits: Tensor, k: int) -> Tensor:
        """int64 [n, min(k, vocab_size)] the first token ids of each line of logits [n, vocab_size]."""
        k = min(k, logits.shape[1])
        if k == 0:
            return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
        least = logits.topk(k, dim=-1).values[:, -1:]
        # topk breaks ties as it likes, so take all that is not below its last value (and NaN: there are always k)
        return rank_tokens(logits, (logits < least).logical_not_())[:, :k]


def rank_tokens(logits: Tensor, mask: Tensor) -> Tensor:
    """[n, m] the ids of the masked tokens in order, m the most that a line has; then `vocab_size`, which is no token.

    logits, mask: [n, vocab_size]
    """
    n, vocab_size = logits.shape
    lines, tokens = mask.nonzero(as_tuple=True)  # ascending in both
    counts = lines.bincount(minlength=n)
    columns = torch.arange(len(lines), device=lines.device) - (counts.cumsum(0) - counts)[lines]
    width = int(counts.max()) if n else 0
    ids = lines.new_full((n, width), vocab_size)
    values = logits.new_full((n, width), -torch.inf)
    ids[lines, columns] = tokens
    values[lines, columns] = logits[lines, tokens]
    return ids.gather(1, values.sort(dim=-1, descending=True, stable=True).indices)
