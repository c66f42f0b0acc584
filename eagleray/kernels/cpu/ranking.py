"""The ranking of tokens, and random draws, by the kernels of `csrc/ranking.h` and `csrc/draw.h`."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.ranking import Draws, Ranking

SINGLE_THREAD_LOGITS = 2**18
"""Up to this number of logits one thread is done before another one wakes."""
SINGLE_THREAD_DRAWS = 2**16
"""Up to this number of logits one thread has drawn before another one wakes."""


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
        # numpy allocates in a fraction of torch's time
        ids, values = torch.from_numpy(np.empty(n, np.int64)), torch.from_numpy(np.empty(n, np.float32))
        outputs = ids.data_ptr(), values.data_ptr()
        memory, threads = self._memory(n, size), self._threads(n * size)
        self._library.er_argmax(logits.data_ptr(), size, n, size, *outputs, memory, threads)
        return ids, values

    def top(self, logits: Tensor, k: int) -> Tensor:
        n, size = logits.shape
        k = min(k, size)
        if not 0 < k <= abi.MAX_TOP_K or not logits.is_contiguous():
            return super().top(logits, k)
        ids, values = torch.empty((n, k), dtype=torch.int32), torch.empty((n, k), dtype=torch.float32)
        outputs = ids.data_ptr(), values.data_ptr()
        memory, threads = self._memory(n, size), self._threads(n * size)
        self._library.er_top_k(logits.data_ptr(), size, n, size, k, *outputs, memory, threads)
        return ids.long()

    def first_allowed(self, logits: Tensor, rows: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not logits.is_contiguous():
            return super().first_allowed(logits, rows, masks)
        n, size = logits.shape
        ids, values, unmasked = torch.empty(n, dtype=torch.int64), *torch.empty((2, n), dtype=torch.float32)
        inputs = logits.data_ptr(), size, n, size, rows.data_ptr(), len(rows), masks.data_ptr()
        outputs = ids.data_ptr(), values.data_ptr(), unmasked.data_ptr()
        self._library.er_argmax_allowed(*inputs, *outputs, self._memory(n, size), self._threads(n * size))
        return ids, values, unmasked

    def draw(self, logits: Tensor, highest: Tensor, draws: Draws, *, out: Tensor) -> bool:
        if not (logits.is_contiguous() and highest.is_contiguous() and out.is_contiguous()):
            return super().draw(logits, highest, draws, out=out)
        n, size = len(draws.rows), logits.shape[1]
        arrays = [np.ascontiguousarray(array) for array in draws]
        c_draws = abi.CDraws(n, *(array.ctypes.data for array in arrays))
        memory = self._reserve(self._library.er_draw_scratch_size(n, size))
        threads = draw_threads(n * size, self._num_threads)
        pointers = highest.data_ptr(), c_draws, out.data_ptr()
        self._library.er_draw(logits.data_ptr(), size, size, *pointers, memory, threads)
        return True

    def _threads(self, num_logits: int) -> int:
        return ranking_threads(num_logits, self._num_threads)

    def _memory(self, num_rows: int, size: int) -> int:
        return self._reserve(self._library.er_ranking_scratch_size(num_rows, size))

    def _reserve(self, needed: int) -> int:
        """Return the address of that many bytes of scratch."""
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return self._scratch.data_ptr()


def ranking_threads(num_logits: int, num_threads: int) -> int:
    """Return the number of threads, at most `num_threads`, that find the highest of that many logits fastest."""
    return num_threads if num_logits > SINGLE_THREAD_LOGITS else 1


def draw_threads(num_logits: int, num_threads: int) -> int:
    """Return the number of threads, at most `num_threads`, that draw from that many logits fastest."""
    return num_threads if num_logits > SINGLE_THREAD_DRAWS else 1
