"""Tokens in order of their logits: the highest first, equal ones by token id.

This order is total, so what is taken from its front never depends on the other lines of a batch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from eagleray.kernels.cpu.abi import abi

FEW_ROWS = 4
"""Up to so many, one thread is done before another one wakes."""


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


class NativeRanking(Ranking):
    """For float32 logits of a CPU, contiguous. `library`: of `build.native_library`."""

    def __init__(self, library: ctypes.CDLL, *, num_threads: int) -> None:
        self._library = library
        self._num_threads = num_threads
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def first(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if not logits.is_contiguous():
            return super().first(logits)
        n, size = logits.shape
        ids, values = torch.empty(n, dtype=torch.int32), torch.empty(n, dtype=torch.float32)
        self._library.er_argmax(
            logits.data_ptr(), size, n, size, ids.data_ptr(), values.data_ptr(), self._memory(n, size), self._threads(n)
        )
        return ids.long(), values

    def top(self, logits: Tensor, k: int) -> Tensor:
        n, size = logits.shape
        k = min(k, size)
        if not 0 < k <= abi.MAX_TOP_K or not logits.is_contiguous():
            return super().top(logits, k)
        ids, values = torch.empty((n, k), dtype=torch.int32), torch.empty((n, k), dtype=torch.float32)
        memory, threads = self._memory(n, size), self._threads(n)
        self._library.er_top_k(logits.data_ptr(), size, n, size, k, ids.data_ptr(), values.data_ptr(), memory, threads)
        return ids.long()

    def _threads(self, num_rows: int) -> int:
        return self._num_threads if num_rows > FEW_ROWS else 1

    def _memory(self, num_rows: int, size: int) -> int:
        needed = self._library.er_ranking_scratch_size(num_rows, size)
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return self._scratch.data_ptr()


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
