"""Memory for packed weights in huge pages, which a core reads a fifth faster than small ones."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

from eagleray.kernels.kv_cache import CACHE_LINE_BYTES, HUGE_PAGE_BYTES

CHUNK_BYTES = 32 << 20


class WeightMemory:
    """Allocates pieces of large chunks, from any thread. A chunk is freed when nothing refers to its pieces."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return [num_elements] zeros that begin at a cache line."""
        size = -(-num_elements * dtype.itemsize // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        with self._lock:
            if self._used + size > len(self._chunk):
                self._chunk, self._used = _map(max(size, CHUNK_BYTES)), 0
            piece = self._chunk[self._used : self._used + num_elements * dtype.itemsize]
            self._used += size
        return piece.view(dtype)


def _map(size: int) -> Tensor:
    """Return uint8 memory of at least `size` bytes that begins at a huge page."""
    size = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[offset : offset + size]
