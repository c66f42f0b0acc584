"""Memory in which new weights are prepared beside the old ones.

It is kept and used again, because the first access to a fresh page costs more than the copy of its contents.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from eagleray.kernels.cpu.huge_pages import WeightChunk, WeightMemory, exchange, whole_lines
from eagleray.kernels.kv_cache import CACHE_LINE_BYTES


class StagingMemory:
    """Pieces for weights that wait until they replace the old ones. A released piece is given out again for weights of
    the same size. May be used from any thread.

    On a CPU, a chunk of the old weights may have a mirror: a chunk in which new weights have the same offsets. If all
    weights of the chunk are there, the two chunks exchange their pages, which takes no copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fresh = WeightMemory()
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._taken: dict[int, Tensor] = {}
        """Piece by its address."""
        self._mirrors: dict[int, Tensor] = {}
        """Mirror of a chunk by the chunk's address."""
        self._mirror_chunks: set[WeightChunk | None] = set()
        self._thread = _ThreadState()
        self._lock = threading.Lock()

    @contextmanager
    def mirroring(self, places: Sequence[Tensor]) -> Iterator[None]:
        """Allocate for this thread, meanwhile, pieces from the mirrors of old weights, if they are free."""
        self._thread.places = places if self._device.type == "cpu" else ()
        try:
            yield
        finally:
            self._thread.places = ()

    def prepare(self, places: Iterable[Tensor]) -> list[ReferenceType[WeightChunk]]:
        """Make the mirrors of old weights in advance, and return them. Their pages are not there yet."""
        chunks = {WeightChunk.of(place) for place in places} if self._device.type == "cpu" else set()
        with self._lock:
            mirrors = [WeightChunk.of(self._mirror(chunk)) for chunk in chunks if chunk is not None]
        return [ref(mirror) for mirror in mirrors if mirror is not None]

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """See `WeightAllocator`."""
        num_bytes = num_elements * dtype.itemsize
        with self._lock:
            piece = self._find_mirrored(num_bytes)
            if piece is None:
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
                whole = self._taken.pop(piece.data_ptr(), None)
                if whole is not None and WeightChunk.of(whole) not in self._mirror_chunks:
                    self._free[len(whole)].append(whole)

    def reset(self) -> None:
        """Make all pieces available again."""
        self.release([*self._taken.values()])

    def replaceable_chunks(self, replaced: Iterable[tuple[Tensor, Tensor]]) -> set[WeightChunk]:
        """Return the chunks all of whose pieces are old weights with new ones in the mirror. `replaced`: old and new
        weights."""
        num_bytes: dict[WeightChunk, int] = defaultdict(int)
        for old, new in replaced:
            mirrored = self._mirrored(old)
            if mirrored is not None and mirrored.data_ptr() == new.data_ptr():
                chunk = WeightChunk.of(old)
                assert chunk is not None
                num_bytes[chunk] += whole_lines(len(old))
        return {chunk for chunk, size in num_bytes.items() if size == chunk.used}

    def exchange(self, chunk: WeightChunk) -> bool:
        """Exchange a chunk with its mirror, see `huge_pages.exchange`."""
        mirror = WeightChunk.of(self._mirrors[chunk.address])
        assert mirror is not None
        return exchange(chunk, mirror)

    def _find_mirrored(self, num_bytes: int) -> Tensor | None:
        """Return a free piece of this size from the mirrors of this thread's places."""
        for place in self._thread.places:
            if len(place) == num_bytes and (chunk := WeightChunk.of(place)) is not None:
                self._mirror(chunk)
                piece = self._mirrored(place)
                if piece is not None and piece.data_ptr() not in self._taken:
                    return piece
        return None

    def _mirror(self, chunk: WeightChunk) -> Tensor:
        """Return the mirror of a chunk, allocating one of its size if necessary."""
        mirror = self._mirrors.get(chunk.address)
        if mirror is None or len(mirror) != chunk.num_bytes:
            mirror = self._mirrors[chunk.address] = WeightChunk.allocate(chunk.num_bytes)
            made = WeightChunk.of(mirror)
            assert made is not None
            made.used = chunk.used
            self._mirror_chunks.add(made)
        return mirror

    def _mirrored(self, place: Tensor) -> Tensor | None:
        """Return the piece of the mirror that has the same offset as `place`."""
        chunk = WeightChunk.of(place)
        mirror = None if chunk is None else self._mirrors.get(chunk.address)
        if chunk is None or mirror is None or len(mirror) != chunk.num_bytes:
            return None
        offset = place.data_ptr() - chunk.address
        return mirror[offset : offset + len(place)]

    def _copied(self, part: Tensor) -> Tensor:
        piece = self.allocate(len(part), torch.uint8)
        copy_memory(part, piece)
        return piece

    def _make(self, num_bytes: int) -> Tensor:
        if self._device.type == "cpu":
            return self._fresh.allocate(num_bytes, torch.uint8)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class _ThreadState(threading.local):
    places: Sequence[Tensor] = ()


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
