"""A tensor-parallel group on one node: its ranks exchange tensors through memory that all of them map.

The memory holds a number for each rank, and two slots for each rank. An operation is one or more rounds, counted from
1. In round k a rank that has something to say writes it into its slot k % 2; then every rank sets its own number to k
and waits until the numbers of those whose slots it wants to read are at least k.

Why two slots are enough, without a second wait at the end of a round: a rank's number is k - 1 only after it is done
with round k - 2, reading included. A rank writes its slot of round k, last written in round k - 2, only once all
numbers are at least k - 1, so nobody reads any more what it overwrites. After a sum that is known already, because the
sum itself has waited for the number k - 1 of every rank.

Memory order. Numbers are words of eight bytes, written and read through a `memoryview` of format "Q", one aligned
move each. x86-64 does not reorder a store with an earlier store, nor a load with an earlier load (total store order;
where a large copy uses non-temporal stores, libc ends it with a fence): a rank that sees number k sees the slot too.
And no rank sets its number to k before its loads of earlier rounds are done, since a store is not reordered with an
earlier load. Other processors give no such promise; there groups use gloo (`distributed.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from eagleray.errors import ChannelClosed, ConfigError, DeadlineExceeded
from eagleray.parallel.group import OPERATION_SECONDS
from eagleray.transport.memory import Region

__all__ = ["Segment", "SharedMemoryGroup"]

WORD = 8
LINE_BYTES = 64
"""A rank's number is on a cache line of its own."""

PAGE_BYTES = 4096
"""Slots begin at a multiple of this, so that all ranks compute sums with the same alignment."""

SLOT_BYTES = 1 << 20
"""Larger tensors go in pieces of this size."""

SPIN_SECONDS = 0.001
"""Ranks compute the same, so usually the others are only microseconds away."""

NAP_SECONDS = 50e-6

MAX_VIEWS = 512
"""Shapes whose views of the slots are kept."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What a rank needs to attach. The descriptor is that of process `pid`."""

    pid: int
    descriptor: int
    nonce: bytes
    slot_bytes: int


class Layout:
    """Where things are: a line for the nonce, a line for each rank's number, then the slots."""

    def __init__(self, num_ranks: int, slot_bytes: int) -> None:
        assert slot_bytes % PAGE_BYTES == 0
        self.num_ranks, self.slot_bytes = num_ranks, slot_bytes
        self.data = -(-LINE_BYTES * (1 + num_ranks) // PAGE_BYTES) * PAGE_BYTES
        self.size = self.data + 2 * num_ranks * slot_bytes

    def number(self, rank: int) -> int:
        """Index among the words."""
        return LINE_BYTES // WORD * (1 + rank)

    def slot(self, rank: int, parity: int) -> int:
        """Offset in the data."""
        return (2 * rank + parity) * self.slot_bytes


class Segment:
    """The memory of a group, made by its first rank before the others know of it."""

    def __init__(self, region: Region, layout: Layout) -> None:
        self._region = region
        self._layout = layout

    @classmethod
    def create(cls, num_ranks: int, *, slot_bytes: int = SLOT_BYTES) -> Segment:
        """Raises `ConfigError` if there is not enough memory."""
        layout = Layout(num_ranks, slot_bytes)
        try:
            return cls(Region.create(layout.size), layout)
        except ConfigError as error:
            raise ConfigError(
                f"the {num_ranks} workers of a tensor-parallel group need {layout.size} bytes of shared memory, which "
                "the system refused: free memory, raise the limit of the container, or lower `tensor_parallel_size`"
            ) from error

    @property
    def ticket(self) -> bytes:
        """For the other ranks."""
        region = self._region
        return msgspec.msgpack.encode(Ticket(os.getpid(), region.descriptor, region.nonce, self._layout.slot_bytes))

    def join(self, *, timeout: float = OPERATION_SECONDS) -> SharedMemoryGroup:
        """The first rank's end. The group owns the memory from now on."""
        return SharedMemoryGroup(self._region, self._layout, rank=0, timeout=timeout)

    @staticmethod
    def attach(ticket: bytes, *, rank: int, num_ranks: int, timeout: float = OPERATION_SECONDS) -> SharedMemoryGroup:
        """Another rank's end. Raises `ConfigError` if the memory cannot be reached from here."""
        made = msgspec.msgpack.decode(ticket, type=Ticket)
        layout = Layout(num_ranks, made.slot_bytes)
        try:
            region = Region.attach(pid=made.pid, descriptor=made.descriptor, size=layout.size, nonce=made.nonce)
        except OSError as error:
            if not os.path.exists(f"/proc/{made.pid}"):
                raise ChannelClosed(
                    f"rank 0 of the group, process {made.pid} of this node, is gone, or in another container: workers "
                    "of one node must share its process ids"
                ) from error
            raise ConfigError(
                f"tensor-parallel rank {rank} cannot open the shared memory of rank 0, which is said to be process "
                f"{made.pid} of the same node ({error}): workers of one node must share its process ids, so start "
                "them in one container"
            ) from error
        return SharedMemoryGroup(region, layout, rank=rank, timeout=timeout)

    def close(self) -> None:
        """Give the memory back; harmless when repeated, and after `join` what the group's `close` does."""
        self._region.close()


class SharedMemoryGroup:
    """See `group.Group`; tensors of the CPU only. Sums of bfloat16 and float16 are computed in float32 and rounded
    once."""

    is_ordered = True

    def __init__(self, region: Region, layout: Layout, *, rank: int, timeout: float) -> None:
        self.rank = rank
        self.size = layout.num_ranks
        self._region = region
        self._layout = layout
        self._timeout = timeout
        self._words = region.words(0, layout.data)
        self._data = region.bytes(layout.data, layout.size - layout.data)
        self._own = layout.number(rank)
        self._others = [other for other in range(self.size) if other != rank]
        self._seen = [0] * self.size  # the last number that was seen of each rank
        self._round = 0
        self._is_closed = False
        self._views: dict[tuple[int, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        for piece in self._pieces(flat):
            slots = self._write("all_reduce", piece)
            for other in self._others:
                self._wait("all_reduce", other, self._round)
            _sum(slots, out=piece)
        return x if x.is_contiguous() else flat.view(x.shape)

    def gather(self, x: Tensor) -> Tensor | None:
        rows = x.reshape(-1, x.shape[-1])
        if self.rank != 0:
            for _, _, piece in self._blocks(rows):
                self._write("gather", piece.reshape(-1))
            return None
        out = rows.new_empty(len(rows), self.size, rows.shape[1])
        out[:, 0] = rows
        for first, left, piece in self._blocks(rows):
            slots = self._listen("gather", piece)
            for other in self._others:
                self._wait("gather", other, self._round)
                part = out[first : first + piece.shape[0], other, left : left + piece.shape[1]]
                part.copy_(slots[other].view(piece.shape))
        return out.view(*x.shape[:-1], self.size * x.shape[-1])

    def broadcast(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        for piece in self._pieces(flat):
            if self.rank == 0:
                self._write("broadcast", piece)
            else:
                slots = self._listen("broadcast", piece)
                self._wait("broadcast", 0, self._round)
                piece.copy_(slots[0])
        return flat.view(x.shape)

    def close(self) -> None:
        self._is_closed = True
        self._views.clear()  # they are addresses of memory that is about to go
        self._region.close()

    def _pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        """At most a slot each."""
        most = self._layout.slot_bytes // flat.itemsize
        if 0 < flat.numel() <= most:
            return (flat,)
        return flat.split(most) if flat.numel() else ()

    def _blocks(self, rows: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, first column, block): parts of a matrix, at most a slot each."""
        most = self._layout.slot_bytes // rows.itemsize
        width = min(rows.shape[1], most)
        height = most // width if width else 0
        for first in range(0, len(rows) if height else 0, height):
            for left in range(0, rows.shape[1], width):
                yield first, left, rows[first : first + height, left : left + width]

    def _write(self, operation: str, piece: Tensor) -> list[Tensor]:
        """Begin a round with something to say, `piece` [numel] -> all slots of the round, [numel] each."""
        self._check_open(operation)
        number = self._round + 1
        for other in self._others:
            if self._seen[other] < number - 1:
                self._wait(operation, other, number - 1)
        slots = self._slots(number, piece)
        slots[self.rank].copy_(piece)
        self._words[self._own] = self._round = number
        return slots

    def _listen(self, operation: str, piece: Tensor) -> list[Tensor]:
        """Begin a round with nothing to say -> all slots of the round, [numel] each."""
        self._check_open(operation)
        self._words[self._own] = self._round = self._round + 1
        return self._slots(self._round, piece)

    def _check_open(self, operation: str) -> None:
        if self._is_closed:
            raise ChannelClosed(f"{operation}: the group was closed")

    def _wait(self, operation: str, other: int, number: int) -> None:
        """Until rank `other` has come to round `number`."""
        words, word = self._words, self._layout.number(other)
        if (seen := words[word]) < number:
            start = time.monotonic()
            while (seen := words[word]) < number:
                waited = time.monotonic() - start
                if waited < SPIN_SECONDS:
                    os.sched_yield()
                elif waited < self._timeout:
                    time.sleep(NAP_SECONDS)
                else:
                    raise DeadlineExceeded(
                        f"{operation}: tensor-parallel rank {self.rank} of {self.size} has waited for rank {other} for "
                        f"{self._timeout:g} s"
                    )
        self._seen[other] = seen

    def _slots(self, number: int, piece: Tensor) -> list[Tensor]:
        key = (piece.numel(), piece.dtype)
        views = self._views.get(key)
        if views is None:
            if len(self._views) == MAX_VIEWS:
                self._views.clear()
            views = self._views[key] = (self._map(*key, parity=0), self._map(*key, parity=1))
        return views[number & 1]

    def _map(self, count: int, dtype: torch.dtype, *, parity: int) -> list[Tensor]:
        with torch.inference_mode(False):  # tensors that are made in that mode cannot be written to outside of it
            return [
                torch.frombuffer(self._data, dtype=dtype, count=count, offset=self._layout.slot(rank, parity))
                for rank in range(self.size)
            ]


def _sum(slots: list[Tensor], *, out: Tensor) -> None:
    """In the order of the ranks, which makes it the same on all of them."""
    if len(slots) > 2 and out.dtype.is_floating_point and out.itemsize < 4:
        total = slots[0].float()
        for slot in slots[1:]:
            total.add_(slot)
        out.copy_(total)
    else:  # of two, a sum in half precision is computed in float32 and rounded once as it is
        torch.add(slots[0], slots[1], out=out)
        for slot in slots[2:]:
            out.add_(slot)
