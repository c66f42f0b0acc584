"""Memory in which new weights are prepared beside the old ones.

It is kept and used again, because the first access to a fresh page costs more than the copy of its contents.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from eagleray.kernels.cpu.huge_pages import WeightMemory
from eagleray.kernels.kv_cache import CACHE_LINE_BYTES


class StagingMemory:
    """Pieces for weights that wait until they replace the old ones. A released piece is given out again for weights of
    the same size. May be used from any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fresh = WeightMemory()
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._taken: dict[int, Tensor] = {}
        """Piece by its address."""
        self._lock = threading.Lock()

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """See `WeightAllocator`."""
        num_bytes = num_elements * dtype.itemsize
        with self._lock:
            free = self._free[num_bytes]
            piece = free.pop() if free else self._make(num_bytes)
            self._taken[piece.data_ptr()] = piece
        return piece.view(dtype)

    def keep(self, memory: Iterable[Tensor]) -> list[Tensor]:
        """Return the memory of weights. Memory that is not in a piece is replaced by a copy in one."""
        return [part if part.data_ptr() in self._taken else self._copied(part) for part in memory]

    def release(self, pieces: Iterable[Tensor]) -> None:
        """Make pieces available again."""
        with self._lock:
            for piece in pieces:
                if (whole := self._taken.pop(piece.data_ptr(), None)) is not None:
                    self._free[len(whole)].append(whole)

    def reset(self) -> None:
        """Make all pieces available again."""
        self.release([*self._taken.values()])

    def _copied(self, part: Tensor) -> Tensor:
        piece = self.allocate(len(part), torch.uint8)
        copy_memory(part, piece)
        return piece

    def _make(self, num_bytes: int) -> Tensor:
        if self._device.type == "cpu":
            return self._fresh.allocate(num_bytes, torch.uint8)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class Scratch(threading.local):
    """Memory for the intermediate tensors of a thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor with any contents. It may be overwritten after the next `reset`."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if self._used + num_bytes > len(self._memory):  # earlier tensors keep the memory that they are in
            self._memory = torch.empty(2 * self._used + num_bytes, dtype=torch.uint8, device=self._device)
            self._used = 0
        piece = self._memory[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        return piece.view(dtype).view(*shape)

    def reset(self) -> None:
        """Give the memory out again from its beginning."""
        self._used = 0


def copy_memory(source: Tensor, out: Tensor) -> None:
    """Copy bytes, on a CPU in one thread and without Python's lock."""
    if out.device.type == "cpu":
        out.numpy()[:] = source.numpy()
    else:
        out.copy_(source)
