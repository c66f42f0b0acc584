"""A group on one node, whose ranks exchange tensors through memory that all of them map, in rounds (`rounds.py`).

A tensor larger than a buffer goes in pieces, a round each. All ranks know how many rounds an operation takes: from the
shape, which is the same on all; from the counts of rows; or, where each rank knows only its own counts (`all_to_all`),
from the line that each rank publishes in the first round. `gather` and `broadcast` wait only for the ranks that
publish; every other operation waits for all ranks in every round.
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
from eagleray.parallel.group import add_in_order
from eagleray.parallel.process_watcher import ProcessWatcher
from eagleray.parallel.rounds import LINE_BYTES, WORD, RoundLayout, Rounds
from eagleray.parallel.timeouts import OPERATION_TIMEOUT_SECONDS
from eagleray.transport.memfd import Region

BUFFER_BYTES = 1 << 20
"""Larger tensors go in pieces of this size."""


class SegmentHandle(msgspec.Struct, frozen=True, array_like=True):
    """The fields that a rank needs to attach. The descriptor is one of process `pid`."""

    pid: int
    descriptor: int
    nonce: bytes
    buffer_bytes: int


class Segment:
    """The memory of a group, created by its first rank before the others know of it."""

    def __init__(self, region: Region, layout: RoundLayout) -> None:
        self._region = region
        self._layout = layout

    @classmethod
    def create(cls, num_ranks: int, *, buffer_bytes: int = BUFFER_BYTES) -> Segment:
        """Allocate the memory. Raises `ConfigError` if there is not enough."""
        layout = RoundLayout(num_ranks, buffer_bytes)
        try:
            return cls(Region.create(layout.size), layout)
        except ConfigError as error:
            raise ConfigError(
                f"a group of {num_ranks} workers needs {layout.size} bytes of shared memory, which the system refused: "
                "free memory, raise the limit of the container, or lower `tensor_parallel_size`"
            ) from error

    @property
    def handle(self) -> bytes:
        """An encoded `SegmentHandle` for the other ranks."""
        region = self._region
        return msgspec.msgpack.encode(
            SegmentHandle(os.getpid(), region.descriptor, region.nonce, self._layout.buffer_bytes)
        )

    def join(
        self,
        *,
        timeout: float = OPERATION_TIMEOUT_SECONDS,
        kind: str = "tensor-parallel",
        watcher: ProcessWatcher | None = None,
    ) -> SharedMemoryGroup:
        """Return the first rank's group, which owns the memory from now on. See `Rounds` for `kind` and `watcher`."""
        rounds = Rounds(self._region, self._layout, rank=0, timeout=timeout, kind=kind, watcher=watcher)
        return SharedMemoryGroup(rounds)

    @staticmethod
    def attach(
        handle: bytes,
        *,
        rank: int,
        num_ranks: int,
        timeout: float = OPERATION_TIMEOUT_SECONDS,
        kind: str = "tensor-parallel",
        watcher: ProcessWatcher | None = None,
    ) -> SharedMemoryGroup:
        """Return another rank's group. Raises `ConfigError` if the memory cannot be reached from here, and
        `ChannelClosed` if the first rank is gone."""
        segment = msgspec.msgpack.decode(handle, type=SegmentHandle)
        layout = RoundLayout(num_ranks, segment.buffer_bytes)
        try:
            region = Region.attach(
                pid=segment.pid, descriptor=segment.descriptor, size=layout.size, nonce=segment.nonce
            )
        except OSError as error:
            if not os.path.exists(f"/proc/{segment.pid}"):
                raise ChannelClosed(
                    f"rank 0 of the group, process {segment.pid} of this node, is gone, or in another container: "
                    "workers of one node must share its process ids"
                ) from error
            raise ConfigError(
                f"{kind} rank {rank} cannot open the shared memory of rank 0, which should be process "
                f"{segment.pid} of the same node ({error}): workers of one node must share its process ids, so start "
                "them in one container"
            ) from error
        return SharedMemoryGroup(Rounds(region, layout, rank=rank, timeout=timeout, kind=kind, watcher=watcher))

    def close(self) -> None:
        """Free the memory; harmless when repeated. After `join` the group's `close` does the same."""
        self._region.close()


class SharedMemoryGroup:
    """A `TensorParallelGroup` for tensors on the CPU. Sums of bfloat16 and float16 are computed in float32 and rounded
    once."""

    is_ordered = True
    is_capturable = False

    def __init__(self, rounds: Rounds) -> None:
        self.rank = rounds.rank
        self.size = rounds.size
        self.bytes_sent: dict[str, int] = Counter()
        self._rounds = rounds
        self._buffer_bytes = rounds.buffer_bytes
        self._others = [other for other in range(self.size) if other != self.rank]

    def join(self, timeout: float) -> None:
        """Wait for all ranks, see `Rounds.join`."""
        self._rounds.join(timeout)

    def all_reduce(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        self.bytes_sent["all_reduce"] += flat.nbytes
        for piece in self._pieces(flat):
            buffers = self._write("all_reduce", piece)
            self._rounds.barrier("all_reduce")
            add_in_order(buffers, out=piece)
        return x if x.is_contiguous() else flat.view(x.shape)

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        out = x.new_empty((sum(counts), *x.shape[1:]))
        sent, received, row_bytes = _as_bytes(x), _as_bytes(out), _row_bytes(x)
        sizes = [count * row_bytes for count in counts]
        starts = list(accumulate(sizes[:-1], initial=0))
        assert len(sent) == sizes[self.rank], "x has the rows of this rank"
        self.bytes_sent["all_gather"] += len(sent)
        for first in range(0, max(sizes), self._buffer_bytes):
            buffers = self._begin_bytes("all_gather")
            piece = sent[first : first + self._buffer_bytes]
            buffers[self.rank][: len(piece)].copy_(piece)
            self._publish_and_wait("all_gather")
            for buffer, start, size in zip(buffers, starts, sizes, strict=True):
                last = min(first + self._buffer_bytes, size)
                if first < last:
                    received[start + first : start + last].copy_(buffer[: last - first])
        return out

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        assert len(x) == sum(counts), "x has the rows of all ranks"
        flat, width = x.reshape(-1), x.shape[1:].numel()
        begin = sum(counts[: self.rank]) * width
        out = x.new_empty((counts[self.rank], *x.shape[1:]))
        total, end, first = out.view(-1), begin + out.numel(), 0
        self.bytes_sent["reduce_scatter"] += flat.nbytes - out.nbytes
        for piece in self._pieces(flat):
            buffers = self._write("reduce_scatter", piece)
            self._rounds.barrier("reduce_scatter")
            low, high = max(begin, first), min(end, first + len(piece))
            if low < high:
                parts = [buffer[low - first : high - first] for buffer in buffers]
                add_in_order(parts, out=total[low - begin : high - begin])
            first += len(piece)
        return out

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Exchange rows. In every round, a rank's buffer begins with a line: the bytes that it sends to each other rank
        in the whole operation. The rest of the buffer carries these bytes, rank by rank, on from where the last round
        ended."""
        out = x.new_empty((sum(receive_counts), *x.shape[1:]))
        sent, received, row_bytes = _as_bytes(x), _as_bytes(out), _row_bytes(x)
        sizes = [count * row_bytes for count in send_counts]
        offsets = list(accumulate((count * row_bytes for count in receive_counts), initial=0))
        assert len(sent) == sum(sizes), "x has the rows that are sent"

        start = sum(sizes[: self.rank])
        before, own, after = sent.split([start, sizes[self.rank], len(sent) - start - sizes[self.rank]])
        received[offsets[self.rank] : offsets[self.rank + 1]].copy_(own)  # it is not sent
        sizes[self.rank] = 0
        self.bytes_sent["all_to_all"] += sum(sizes)

        line, head = torch.tensor(sizes).view(torch.uint8), -(-self.size * WORD // LINE_BYTES) * LINE_BYTES
        first, longest = 0, 1  # also with nothing to send there is a first round
        while first < longest:
            buffers = self._begin_bytes("all_to_all")
            buffers[self.rank][: len(line)].copy_(line)
            _fill_window((before, after), first, into=buffers[self.rank][head:])
            self._publish_and_wait("all_to_all")
            table = [buffer[: len(line)].view(torch.int64).tolist() for buffer in buffers]
            longest = max(sum(row) for row in table)
            for other in self._others:
                assert table[other][self.rank] == offsets[other + 1] - offsets[other], "the counts of two ranks differ"
                part, start = received[offsets[other] : offsets[other + 1]], sum(table[other][: self.rank])
                _copy_from_window(buffers[other][head:], first, into=part, start=start)
            first += self._buffer_bytes - head
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
            buffers = self._rounds.begin_read("gather", piece.numel(), piece.dtype)
            for other in self._others:
                self._rounds.wait("gather", other)
                part = out[first : first + piece.shape[0], other, left : left + piece.shape[1]]
                part.copy_(buffers[other].view(piece.shape))
        return out.view(*x.shape[:-1], self.size * x.shape[-1])

    def broadcast(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        if self.rank == 0:
            self.bytes_sent["broadcast"] += x.nbytes
        for piece in self._pieces(flat):
            if self.rank == 0:
                self._write("broadcast", piece)
            else:
                buffers = self._rounds.begin_read("broadcast", piece.numel(), piece.dtype)
                self._rounds.wait("broadcast", 0)
                piece.copy_(buffers[0])
        return flat.view(x.shape)

    def close(self) -> None:
        self._rounds.close()

    def _pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Return the pieces of a tensor, each at most a buffer long."""
        most = self._buffer_bytes // flat.itemsize
        if 0 < flat.numel() <= most:
            return (flat,)
        return flat.split(most) if flat.numel() else ()

    def _blocks(self, rows: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (first row, first column, block) for parts of a matrix, each at most a buffer long."""
        most = self._buffer_bytes // rows.itemsize
        width = min(rows.shape[1], most)
        height = most // width if width else 0
        for first in range(0, len(rows) if height else 0, height):
            for left in range(0, rows.shape[1], width):
                yield first, left, rows[first : first + height, left : left + width]

    def _write(self, operation: str, piece: Tensor) -> list[Tensor]:
        """Publish `piece` [numel], and return all buffers of the round, [numel] each."""
        buffers = self._rounds.begin_write(operation, piece.numel(), piece.dtype)
        buffers[self.rank].copy_(piece)
        self._rounds.publish()
        return buffers

    def _begin_bytes(self, operation: str) -> list[Tensor]:
        """Begin the next round, and return all of its buffers as bytes."""
        return self._rounds.begin_write(operation, self._buffer_bytes, torch.uint8)

    def _publish_and_wait(self, operation: str) -> None:
        self._rounds.publish()
        self._rounds.barrier(operation)


def _as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _row_bytes(x: Tensor) -> int:
    return x.shape[1:].numel() * x.itemsize


def _fill_window(parts: Sequence[Tensor], first: int, *, into: Tensor) -> None:
    """Copy bytes of the concatenated parts, from the byte `first` on, to `into`, until it is full."""
    offset = -first
    for part in parts:
        low, high = max(offset, 0), min(offset + len(part), len(into))
        if low < high:
            into[low:high].copy_(part[low - offset : high - offset])
        offset += len(part)


def _copy_from_window(window: Tensor, first: int, *, into: Tensor, start: int) -> None:
    """Copy the bytes of a window, which begins at the byte `first`, that belong to the part that begins at `start`."""
    low, high = max(first, start), min(first + len(window), start + len(into))
    if low < high:
        into[low - start : high - start].copy_(window[low - first : high - first])
