"""The ranking of tokens by the kernels of `csrc/ranking.h`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.ranking import Ranking

SINGLE_THREAD_ROWS = 4
"""Up to this number of rows one thread is done before another one wakes."""


class NativeRanking(Ranking):
    """The ranking of contiguous float32 logits; of others, and beyond `MAX_TOP_K`, in plain torch."""

    def __init__(self, library: ctypes.CDLL, *, num_threads: int) -> None:
        self._library = library
        self._num_threads = num_threads
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def first(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if not logits.is_contiguous():
            return super().first(logits)
        n, size = logits.shape
        ids, values = torch.empty(n, dtype=torch.int32), torch.empty(n, dtype=torch.float32)
        outputs = ids.data_ptr(), values.data_ptr()
        memory, threads = self._memory(n, size), self._threads(n)
        self._library.er_argmax(logits.data_ptr(), size, n, size, *outputs, memory, threads)
        return ids.long(), values

    def top(self, logits: Tensor, k: int) -> Tensor:
        n, size = logits.shape
        k = min(k, size)
        if not 0 < k <= abi.MAX_TOP_K or not logits.is_contiguous():
            return super().top(logits, k)
        ids, values = torch.empty((n, k), dtype=torch.int32), torch.empty((n, k), dtype=torch.float32)
        outputs = ids.data_ptr(), values.data_ptr()
        memory, threads = self._memory(n, size), self._threads(n)
        self._library.er_top_k(logits.data_ptr(), size, n, size, k, *outputs, memory, threads)
        return ids.long()

    def keep_allowed(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        if not logits.is_contiguous():
            super().keep_allowed(logits, rows, masks)
            return
        size, num_rows = logits.shape[1], len(rows)
        pointers = logits.data_ptr(), size, rows.data_ptr()
        self._library.er_keep_allowed(*pointers, num_rows, size, masks.data_ptr(), self._threads(num_rows))

    def _threads(self, num_rows: int) -> int:
        return self._num_threads if num_rows > SINGLE_THREAD_ROWS else 1

    def _memory(self, num_rows: int, size: int) -> int:
        needed = self._library.er_ranking_scratch_size(num_rows, size)
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return self._scratch.data_ptr()
