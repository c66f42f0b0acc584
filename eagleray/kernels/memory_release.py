"""Release of the memory of weights and caches while nothing computes with them.

On a CPU, pages are returned and tensors keep their addresses: the system provides pages of zeros at the next access. On
a GPU, storages are freed, and are allocated again at other addresses, so captured graphs must be freed before.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

MINCORE_PAGES = 1 << 18
"""Pages whose presence is read at a time, a byte for each."""


class ReleasableMemory(Protocol):
    """Memory of tensors that is returned to the system and taken back."""

    def release(self, *, keeps: bool) -> int:
        """Return the memory to the system, and return the number of bytes. `keeps`: the contents are the same after
        `restore`; else they are lost and become zeros. Memory that is released already only loses its contents."""
        ...

    def restore(self) -> None:
        """Take back the memory. Raises `torch.OutOfMemoryError` if there is too little; it remains released then."""
        ...


def releasable_memory(tensors: Sequence[Tensor], device: torch.device) -> ReleasableMemory:
    """Return the memory of tensors on a device. On a CPU, contents are only kept in place, so nothing is returned."""
    return ReleasablePages(tensors) if device.type == "cpu" else ReleasableStorages(tensors)


class ReleasablePages(ReleasableMemory):
    """Memory of tensors on a CPU, which keep their addresses."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def release(self, *, keeps: bool) -> int:
        return 0 if keeps else release_pages(self._tensors)

    def restore(self) -> None:
        """Do nothing: the system provides the pages at the next access."""


class ReleasableStorages(ReleasableMemory):
    """Storages of tensors on a GPU. The tensors must not be read while they are released. If contents are kept, they
    are on the host meanwhile. The storages are whole: no other tensors may share them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        self._copies: list[Tensor] | None = None
        self._is_released = False

    def release(self, *, keeps: bool) -> int:
        if self._is_released:
            self._copies = self._copies if keeps else None
            return 0
        if keeps:  # all are copied before any is freed, since the host may have too little memory
            self._copies = [
                torch.empty(size, dtype=torch.uint8).copy_(_bytes_of(storage)) for storage, size in self._storages
            ]
        for storage, _ in self._storages:
            storage.resize_(0)
        self._is_released = True
        return sum(size for _, size in self._storages)

    def restore(self) -> None:
        if not self._is_released:
            return
        try:
            for storage, size in self._storages:
                storage.resize_(size)
        except torch.OutOfMemoryError:
            for storage, _ in self._storages:
                storage.resize_(0)
            raise
        for index, (storage, _) in enumerate(self._storages):
            if self._copies is None:
                _bytes_of(storage).zero_()  # random bits may be NaN, which masked values of a cache must not be
            else:
                _bytes_of(storage).copy_(self._copies[index])
        self._copies, self._is_released = None, False


def release_pages(tensors: Iterable[Tensor]) -> int:
    """Return the memory of contiguous tensors on a CPU to the system, and return the number of bytes. The tensors keep
    their addresses and contain zeros afterwards. Pages with other contents, too, are not returned.

    The memory must not be shared with other processes, since they would keep it. Raises `OSError` if the system refuses
    because memory is locked; contents are undefined then.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    ranges = _ranges(tensors)
    pages = [_whole_pages(*each) for each in ranges]
    num_before = sum(_resident_bytes(libc, *each) for each in pages)
    for (begin, end), (first, last) in zip(ranges, pages, strict=True):
        # before any page is returned, since an access may map a huge page, which other ranges may share
        _clear(begin, first)
        _clear(last, end)
    for first, last in pages:
        if first < last and libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise")
    return num_before - sum(_resident_bytes(libc, *each) for each in pages)


def _ranges(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return the memory of tensors (address, end) in order. Neighbours, which may share a page, are one range."""
    ranges: list[tuple[int, int]] = []
    for tensor in sorted(tensors, key=Tensor.data_ptr):
        assert tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_shared()
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if ranges and begin <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], end)
        else:
            ranges.append((begin, end))
    return ranges


def _clear(begin: int, end: int) -> None:
    """Overwrite memory with zeros. If it has only zeros, it is not written to, which would bring pages into memory."""
    if any(ctypes.string_at(begin, end - begin)):
        ctypes.memset(begin, 0, end - begin)


def _whole_pages(begin: int, end: int) -> tuple[int, int]:
    """Return the first and the end of the pages that lie within a range; both are its end if it has no whole page."""
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    return (first, last) if first < last else (end, end)


def _resident_bytes(libc: ctypes.CDLL, first: int, last: int) -> int:
    """Return the bytes of the pages from `first` to `last` that are in memory."""
    num_pages = 0
    for part in range(first, last, MINCORE_PAGES * mmap.PAGESIZE):
        size = min(last - part, MINCORE_PAGES * mmap.PAGESIZE)
        present = np.empty(size // mmap.PAGESIZE, dtype=np.uint8)
        if libc.mincore(ctypes.c_void_p(part), ctypes.c_size_t(size), ctypes.c_void_p(present.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore")
        num_pages += int(np.count_nonzero(present & 1))
    return num_pages * mmap.PAGESIZE


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
