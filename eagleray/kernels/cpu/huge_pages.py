"""Memory for packed weights in huge pages, which a core reads a fifth faster than small ones.

It is allocated in chunks. Two chunks can exchange their contents without a copy: their addresses exchange pages.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from eagleray.kernels.kv_cache import CACHE_LINE_BYTES, HUGE_PAGE_BYTES

CHUNK_BYTES = 32 << 20

MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP = 1, 2, 4
MREMAP_FAILED = ctypes.c_void_p(-1).value


class WeightChunk(mmap.mmap):
    """Private pages of this process. Its tensors keep it alive."""

    address: int
    """Address of its first huge page."""
    num_bytes: int
    """Bytes from there on, a multiple of the huge page."""
    used: int
    """Bytes that were allocated, in whole cache lines."""

    @classmethod
    def of(cls, piece: Tensor) -> WeightChunk | None:
        """Return the chunk that a tensor lies in, if it lies in one."""
        return _chunks.get(piece.untyped_storage().data_ptr())

    @classmethod
    def allocate(cls, size: int) -> Tensor:
        """Return the memory of a new chunk, uint8, which has at least `size` bytes."""
        size = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        chunk = cls(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # a kernel without huge pages
            chunk.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(chunk, dtype=torch.uint8)
        offset = -whole.data_ptr() % HUGE_PAGE_BYTES
        chunk.address, chunk.num_bytes, chunk.used = whole.data_ptr() + offset, size, 0
        _chunks[whole.data_ptr()] = chunk
        return whole[offset : offset + size]


_chunks: WeakValueDictionary[int, WeightChunk] = WeakValueDictionary()
"""Chunks by the address of their storage, which their pieces have in common."""


class WeightMemory:
    """Allocates pieces of large chunks, from any thread. A chunk is freed when nothing refers to its pieces."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return [num_elements] zeros that begin at a cache line."""
        num_bytes = num_elements * dtype.itemsize
        with self._lock:
            if self._used + whole_lines(num_bytes) > len(self._chunk):
                self._chunk, self._used = WeightChunk.allocate(max(num_bytes, CHUNK_BYTES)), 0
            piece = self._chunk[self._used : self._used + num_bytes]
            self._used += whole_lines(num_bytes)
            if (chunk := WeightChunk.of(self._chunk)) is not None:
                chunk.used = self._used
        return piece.view(dtype)


def whole_lines(num_bytes: int) -> int:
    """Return the bytes of the cache lines that a piece takes."""
    return -(-num_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def exchange(one: WeightChunk, other: WeightChunk) -> bool:
    """Exchange the contents of two chunks of equal size by exchanging their pages; addresses stay. Return False, and
    change nothing, if the system cannot. Raises `OSError` if it fails halfway.

    `other` is not to be used meanwhile. A thread that reads `one` gets undefined contents, as during a copy, but is not
    killed: its addresses are always mapped.
    """
    assert one.num_bytes == other.num_bytes
    try:
        spare = WeightChunk(-1, one.num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return False
    # a huge page is moved as a whole only to the address of one
    between = -(-ctypes.addressof(ctypes.c_char.from_buffer(spare)) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if not _move_pages(one.address, between, one.num_bytes):
        return False
    if not _move_pages(other.address, one.address, one.num_bytes):
        if not _move_pages(between, one.address, one.num_bytes):
            raise OSError(ctypes.get_errno(), "mremap")
        return False
    if not _move_pages(between, other.address, one.num_bytes):
        raise OSError(ctypes.get_errno(), "mremap")
    return True


def _move_pages(source: int, target: int, size: int) -> bool:
    """Move pages to `target`, replacing the pages there, and return whether it worked. `source` stays mapped, and
    empty."""
    flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
    moved = _libc.mremap(
        ctypes.c_void_p(source), ctypes.c_size_t(size), ctypes.c_size_t(size), flags, ctypes.c_void_p(target)
    )
    return bool(moved != MREMAP_FAILED)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
