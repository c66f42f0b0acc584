"""The order of tokens by their logits: the highest first, equal ones by token id.

The order is total, so its first tokens never depend on the other rows of a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MASK_BITS = 32
DRAW_ONE_BITS = 40


class Ranking:
    """The ranking in plain torch. NaN ranks above every number."""

    def first(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first token id of each row of `logits` [n, vocab_size] as int64 [n], and its logit [n]."""
        token_ids = logits.argmax(dim=-1)
        return token_ids, logits.gather(1, token_ids[:, None])[:, 0]

    def top(self, logits: Tensor, k: int) -> Tensor:
        """Return the first token ids of each row of `logits` [n, vocab_size]: int64 [n, min(k, vocab_size)]."""
        k = min(k, logits.shape[1])
        if k == 0:
            return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
        least = logits.topk(k, dim=-1).values[:, -1:]
        # topk breaks ties arbitrarily, so rank every token that is not below its last value (NaN is never below, so
        # these are at least k)
        return rank_tokens(logits, (logits < least).logical_not_())[:, :k]

    def keep_allowed(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Set the logits of the tokens that are not in the mask of their row to minus infinity, in place.

        logits: [n, vocab_size]; rows: int64 [m]; masks: int32 [m, ceil(vocab_size / 32)], one bit for each token, the
        first one the lowest.
        """
        bits = torch.arange(MASK_BITS, dtype=torch.int32, device=masks.device)
        allowed = (masks[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits[rows] = logits[rows].masked_fill_(allowed.logical_not_(), -torch.inf)

    def first_allowed(self, logits: Tensor, rows: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Do as `keep_allowed`, with `rows` in ascending order. Returns what `first` then returns for all rows, and the
        highest logit of each row before, [n]."""
        unmasked = logits.amax(dim=-1)
        self.keep_allowed(logits, rows, masks)
        return *self.first(logits), unmasked

    def draw(self, logits: Tensor, highest: Tensor, draws: Draws, *, out: Tensor) -> bool:
        """Draw a token from each row of `logits` [n, vocab_size] that `draws` has, into the same index of `out`, int64
        [n]. Returns False if the ranking has no function for it.

        highest: [n] the highest logits, which must be finite in these rows.
        """
        return False


class Draws(NamedTuple):
    """Random draws of one token each, from those tokens of its row that top_k, and of these top_p, keep."""

    rows: npt.NDArray[np.int64]
    """[m] no row twice"""
    temperature: npt.NDArray[np.float32]
    """[m]"""
    uniforms: npt.NDArray[np.float64]
    """[m] numbers of (0, 1) that decide"""
    least_weights: npt.NDArray[np.int64]
    """[m] Tokens of a lower weight are not drawn, and weigh nothing for top_p. The likeliest one weighs
    2**DRAW_ONE_BITS."""
    top_k: npt.NDArray[np.int64]
    """[m] above 0; the size of the vocabulary, or more, if it does not restrict the draw"""
    top_p: npt.NDArray[np.float64]
    """[m] of (0, 1]; 1 if it does not restrict the draw"""


def rank_tokens(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the ids of the masked tokens in order: [n, m], m being the most that a row has. Shorter rows are filled
    with `vocab_size`, which is no token.

    logits, mask: [n, vocab_size]
    """
    n, vocab_size = logits.shape
    rows, tokens = mask.nonzero(as_tuple=True)  # ascending in both
    counts = rows.bincount(minlength=n)
    columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    width = int(counts.max()) if n else 0
    ids = rows.new_full((n, width), vocab_size)
    values = logits.new_full((n, width), -torch.inf)
    ids[rows, columns] = tokens
    values[rows, columns] = logits[rows, tokens]
    return ids.gather(1, values.sort(dim=-1, descending=True, stable=True).indices)
