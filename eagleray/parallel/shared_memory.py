"""A group on one node: its ranks exchange tensors through memory that all of them map, in rounds (`rounds.py`).

Tensors larger than a slot go in pieces, a round each. How many rounds an operation takes is known to all ranks: from
the shape, which is the same on all, from the counts of rows, or, where each rank knows only its own (`all_to_all`),
from what the ranks say in the first round. `gather` and `broadcast` wait only for those that speak; every other
operation meets all ranks in every round.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec
import torch
from torch import Tensor

from eagleray.errors import ChannelClosed, ConfigError
from eagleray.parallel.group import OPERATION_SECONDS
from eagleray.parallel.process_watcher import ProcessWatcher
from eagleray.parallel.rounds import LINE_BYTES, WORD, RoundLayout, Rounds
from eagleray.parallel.sums import add_in_order
from eagleray.transport.memfd import Region

SLOT_BYTES = 1 << 20
"""Larger tensors go in pieces of this size."""


class SegmentHandle(msgspec.Struct, frozen=True, array_like=True):
    """What a rank needs to attach. The descriptor is that of process `pid`."""

    pid: int
    descriptor: int
    nonce: bytes
    slot_bytes: int


class Segment:
    """The memory of a group, made by its first rank before the others know of it."""

    def __init__(self, region: Region, layout: RoundLayout) -> None:
        self._region = region
        self._layout = layout

    @classmethod
    def create(cls, num_ranks: int, *, slot_bytes: int = SLOT_BYTES) -> Segment:
        """Raises `ConfigError` if there is not enough memory."""
        layout = RoundLayout(num_ranks, slot_bytes)
        try:
            return cls(Region.create(layout.size), layout)
        except ConfigError as error:
            raise ConfigError(
                f"a group of {num_ranks} workers needs {layout.size} bytes of shared memory, which the system refused: "
                "free memory, raise the limit of the container, or lower `tensor_parallel_size`"
            ) from error

    @property
    def ticket(self) -> bytes:
        """For the other ranks."""
        region = self._region
        return msgspec.msgpack.encode(
            SegmentHandle(os.getpid(), region.descriptor, region.nonce, self._layout.slot_bytes)
        )

    def join(
        self,
        *,
        timeout: float = OPERATION_SECONDS,
        kind: str = "tensor-parallel",
        processes: ProcessWatcher | None = None,
    ) -> SharedMemoryGroup:
        """The first rank's end. The group owns the memory from now on. `kind`, `processes`: see `Rounds`."""
        rounds = Rounds(self._region, self._layout, rank=0, timeout=timeout, kind=kind, processes=processes)
        return SharedMemoryGroup(rounds)

    @staticmethod
    def attach(
        ticket: bytes,
        *,
        rank: int,
        num_ranks: int,
        timeout: float = OPERATION_SECONDS,
        kind: str = "tensor-parallel",
        processes: ProcessWatcher | None = None,
    ) -> SharedMemoryGroup:
        """Another rank's end. Raises `ConfigError` if the memory cannot be reached from here, and `ChannelClosed` if
        the first rank is gone."""
        made = msgspec.msgpack.decode(ticket, type=SegmentHandle)
        layout = RoundLayout(num_ranks, made.slot_bytes)
        try:
            region = Region.attach(pid=made.pid, descriptor=made.descriptor, size=layout.size, nonce=made.nonce)
        except OSError as error:
            if not os.path.exists(f"/proc/{made.pid}"):
                raise ChannelClosed(
                    f"rank 0 of the group, process {made.pid} of this node, is gone, or in another container: workers "
                    "of one node must share its process ids"
                ) from error
            raise ConfigError(
                f"{kind} rank {rank} cannot open the shared memory of rank 0, which is said to be process "
                f"{made.pid} of the same node ({error}): workers of one node must share its process ids, so start "
                "them in one container"
            ) from error
        return SharedMemoryGroup(Rounds(region, layout, rank=rank, timeout=timeout, kind=kind, processes=processes))

    def close(self) -> None:
        """Give the memory back; harmless when repeated, and after `join` what the group's `close` does."""
        self._region.close()


class SharedMemoryGroup:
    """See `group.Group`; tensors of the CPU only. Sums of bfloat16 and float16 are computed in float32 and rounded
    once."""

    is_ordered = True

    def __init__(self, rounds: Rounds) -> None:
        self.rank = rounds.rank
        self.size = rounds.size
        self.bytes_sent: dict[str, int] = Counter()
        self._rounds = rounds
        self._slot_bytes = rounds.slot_bytes
        self._others = [other for other in range(self.size) if other != self.rank]

    def assemble(self, timeout: float) -> None:
        """See `Rounds`."""
        self._rounds.assemble(timeout)

    def all_reduce(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        self.bytes_sent["all_reduce"] += flat.nbytes
        for piece in self._pieces(flat):
            slots = self._write("all_reduce", piece)
            self._rounds.meet("all_reduce")
            add_in_order(slots, out=piece)
        return x if x.is_contiguous() else flat.view(x.shape)

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        out = x.new_empty((sum(counts), *x.shape[1:]))
        said, heard, row_bytes = _as_bytes(x), _as_bytes(out), _row_bytes(x)
        sizes = [count * row_bytes for count in counts]
        starts = list(accumulate(sizes[:-1], initial=0))
        assert len(said) == sizes[self.rank], "the rows of this rank are as many as it counts"
        self.bytes_sent["all_gather"] += len(said)
        for first in range(0, max(sizes), self._slot_bytes):
            slots = self._begin("all_gather")
            piece = said[first : first + self._slot_bytes]
            slots[self.rank][: len(piece)].copy_(piece)
            self._end("all_gather")
            for slot, start, size in zip(slots, starts, sizes, strict=True):
                last = min(first + self._slot_bytes, size)
                if first < last:
                    heard[start + first : start + last].copy_(slot[: last - first])
        return out

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        assert len(x) == sum(counts), "there are as many rows as the ranks are to get"
        flat, width = x.reshape(-1), x.shape[1:].numel()
        begin = sum(counts[: self.rank]) * width
        out = x.new_empty((counts[self.rank], *x.shape[1:]))
        total, end, first = out.view(-1), begin + out.numel(), 0
        self.bytes_sent["reduce_scatter"] += flat.nbytes - out.nbytes
        for piece in self._pieces(flat):
            slots = self._write("reduce_scatter", piece)
            self._rounds.meet("reduce_scatter")
            low, high = max(begin, first), min(end, first + len(piece))
            if low < high:
                parts = [slot[low - first : high - first] for slot in slots]
                add_in_order(parts, out=total[low - begin : high - begin])
            first += len(piece)
        return out

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """In every round a rank's slot begins with a line that says how many bytes it has for each other rank in all;
        behind it, from round to round, come these bytes, rank by rank."""
        out = x.new_empty((sum(receive_counts), *x.shape[1:]))
        said, heard, row_bytes = _as_bytes(x), _as_bytes(out), _row_bytes(x)
        sizes = [count * row_bytes for count in send_counts]
        places = list(accumulate((count * row_bytes for count in receive_counts), initial=0))
        assert len(said) == sum(sizes), "there are as many rows as are sent"

        start = sum(sizes[: self.rank])
        before, own, after = said.split([start, sizes[self.rank], len(said) - start - sizes[self.rank]])
        heard[places[self.rank] : places[self.rank + 1]].copy_(own)  # it is not sent
        sizes[self.rank] = 0
        self.bytes_sent["all_to_all"] += sum(sizes)

        line, head = torch.tensor(sizes).view(torch.uint8), -(-self.size * WORD // LINE_BYTES) * LINE_BYTES
        first, longest = 0, 1  # there is a first round, whatever there is to send
        while first < longest:
            slots = self._begin("all_to_all")
            slots[self.rank][: len(line)].copy_(line)
            _put_window((before, after), first, into=slots[self.rank][head:])
            self._end("all_to_all")
            table = [slot[: len(line)].view(torch.int64).tolist() for slot in slots]
            longest = max(sum(row) for row in table)
            for other in self._others:
                assert table[other][self.rank] == places[other + 1] - places[other], "what one sends another receives"
                part, start = heard[places[other] : places[other + 1]], sum(table[other][: self.rank])
                _take_window(slots[other][head:], first, into=part, start=start)
            first += self._slot_bytes - head
        return out

    def gather(self, x: Tensor) -> Tensor | None:
        rows = x.reshape(-1, x.shape[-1])
        if self.rank != 0:
            self.bytes_sent["gather"] += x.nbytes
            for _, _, piece in self._blocks(rows):
                self._write("gather", piece.reshape(-1))
            return None
        out = rows.new_empty(len(rows), self.size, rows.shape[1])
        out[:, 0] = rows
        for first, left, piece in self._blocks(rows):
            slots = self._rounds.listen("gather", piece.numel(), piece.dtype)
            for other in self._others:
                self._rounds.wait("gather", other)
                part = out[first : first + piece.shape[0], other, left : left + piece.shape[1]]
                part.copy_(slots[other].view(piece.shape))
        return out.view(*x.shape[:-1], self.size * x.shape[-1])

    def broadcast(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        if self.rank == 0:
            self.bytes_sent["broadcast"] += x.nbytes
        for piece in self._pieces(flat):
            if self.rank == 0:
                self._write("broadcast", piece)
            else:
                slots = self._rounds.listen("broadcast", piece.numel(), piece.dtype)
                self._rounds.wait("broadcast", 0)
                piece.copy_(slots[0])
        return flat.view(x.shape)

    def close(self) -> None:
        self._rounds.close()

    def _pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        """At most a slot each."""
        most = self._slot_bytes // flat.itemsize
        if 0 < flat.numel() <= most:
            return (flat,)
        return flat.split(most) if flat.numel() else ()

    def _blocks(self, rows: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, first column, block): parts of a matrix, at most a slot each."""
        most = self._slot_bytes // rows.itemsize
        width = min(rows.shape[1], most)
        height = most // width if width else 0
        for first in range(0, len(rows) if height else 0, height):
            for left in range(0, rows.shape[1], width):
                yield first, left, rows[first : first + height, left : left + width]

    def _write(self, operation: str, piece: Tensor) -> list[Tensor]:
        """Say `piece` [numel] -> all slots of the round, [numel] each."""
        slots = self._rounds.begin(operation, piece.numel(), piece.dtype)
        slots[self.rank].copy_(piece)
        self._rounds.say()
        return slots

    def _begin(self, operation: str) -> list[Tensor]:
        """All slots of the next round, in bytes."""
        return self._rounds.begin(operation, self._slot_bytes, torch.uint8)

    def _end(self, operation: str) -> None:
        self._rounds.say()
        self._rounds.meet(operation)


def _as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _row_bytes(x: Tensor) -> int:
    return x.shape[1:].numel() * x.itemsize


def _put_window(parts: Sequence[Tensor], first: int, *, into: Tensor) -> None:
    """What `into` has room for of the parts, one after another, from the byte `first` on."""
    place = -first
    for part in parts:
        low, high = max(place, 0), min(place + len(part), len(into))
        if low < high:
            into[low:high].copy_(part[low - place : high - place])
        place += len(part)


def _take_window(window: Tensor, first: int, *, into: Tensor, start: int) -> None:
    """What is in a window that begins with the byte `first`, of a part that begins with the byte `start`."""
    low, high = max(first, start), min(first + len(window), start + len(into))
    if low < high:
        into[low - start : high - start].copy_(window[low - first : high - first])
