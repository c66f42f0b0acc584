"""The exchange of bytes between ranks on one node, through memory that all of them map.

The memory holds a counter and two buffers for each rank. An operation is one or more rounds, numbered from 1; all ranks
take the same rounds, whether or not they have something to publish. In round k a rank that has something to publish
writes it into its buffer k % 2; then every rank sets its own counter to k, and waits until the counters of the ranks
whose buffers it wants to read are at least k.

Two buffers are enough, without a second wait at the end of a round, for this reason: a rank's counter is k - 1 only
after the rank is done with round k - 2, reading included. A rank writes its buffer of round k, which was last written
in round k - 2, only once all counters are at least k - 1, so no rank still reads the bytes that it overwrites. After a
round in which it has waited for all others it knows this already.

Memory order. Counters are words of eight bytes, written and read through a `memoryview` of format "Q", one aligned move
each. x86-64 does not reorder a store with an earlier store, nor a load with an earlier load (total store order; where a
large copy uses non-temporal stores, libc ends it with a fence): a rank that sees counter k sees the buffer too. And no
rank sets its counter to k before its loads of earlier rounds are done, since a store is not reordered with an earlier
load. Other processors give no such promise; on these, groups use gloo (`distributed.py`).

Ranks that exit. A rank sets a flag when it leaves; a process that was killed is noticed by its descriptor, if the group
watches it. A waiting rank checks both from time to time, and gives up if a rank is gone that has not reached the round
it waits for. It reads that rank's counter once more after it knows that the rank is gone, so everything that a rank has
published before its exit counts, no matter who checks when. If every round of an operation waits for all ranks
(`barrier`), all remaining ranks give up in the same round: the first that some rank has not reached. None of them goes
beyond it, and each reaches it.
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.parallel.process_watcher import ProcessWatcher
from eagleray.parallel.timeouts import POLL_INTERVAL_SECONDS, SLEEP_SECONDS, SPIN_SECONDS
from eagleray.transport.memfd import Region

WORD = 8
LINE_BYTES = 64
"""Each rank's counter and its flag for having left are on a cache line of their own."""

PAGE_BYTES = 4096
"""Buffers begin at a multiple of this, so that all ranks compute sums with the same alignment."""

MAX_VIEWS = 512
"""Shapes whose views of the buffers are kept."""

UNREACHABLE_ROUND = 1 << 63


class RoundLayout:
    """Positions in the memory: a line for the nonce, a line for each rank, then the buffers."""

    def __init__(self, num_ranks: int, buffer_bytes: int) -> None:
        assert buffer_bytes % PAGE_BYTES == 0
        self.num_ranks, self.buffer_bytes = num_ranks, buffer_bytes
        self.data = -(-LINE_BYTES * (1 + num_ranks) // PAGE_BYTES) * PAGE_BYTES
        self.size = self.data + 2 * num_ranks * buffer_bytes

    def counter(self, rank: int) -> int:
        """Return the index of the rank's counter among the words."""
        return LINE_BYTES // WORD * (1 + rank)

    def left(self, rank: int) -> int:
        """Return the index, among the words, of the flag that the rank has left."""
        return self.counter(rank) + 1

    def buffer(self, rank: int, parity: int) -> int:
        """Return the offset of a buffer in the data."""
        return (2 * rank + parity) * self.buffer_bytes


class Rounds:
    """A rank's end of the memory, which it owns. `kind` is the kind of group, for messages. `watcher`, if given, is
    owned too: it watches the processes of the ranks, so that their exits are noticed."""

    def __init__(
        self,
        region: Region,
        layout: RoundLayout,
        *,
        rank: int,
        timeout: float,
        kind: str = "tensor-parallel",
        watcher: ProcessWatcher | None = None,
    ) -> None:
        self.rank = rank
        self.size = layout.num_ranks
        self.buffer_bytes = layout.buffer_bytes
        self._region = region
        self._layout = layout
        self._timeout = timeout
        self._kind = kind
        self._watcher = watcher
        self._words = region.words(0, layout.data)
        self._data = region.bytes(layout.data, layout.size - layout.data)
        self._own = layout.counter(rank)
        self._others = [other for other in range(self.size) if other != rank]
        self._seen = [0] * self.size  # the latest known counter of each rank
        self._round = 0
        self._is_closed = False
        self._views: dict[tuple[int, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}

    def begin_write(self, operation: str, count: int, dtype: torch.dtype) -> list[Tensor]:
        """Begin a round with something to publish, and return the buffers of all ranks, [count] each. The caller writes
        into this rank's own and then calls `publish`."""
        self._check_open(operation)
        before = self._round
        for other in self._others:
            if self._seen[other] < before:
                self._wait(operation, other, before)
        return self._buffers(before + 1, count, dtype)

    def publish(self) -> None:
        """Let the others read this rank's buffer of the round."""
        self._words[self._own] = self._round = self._round + 1

    def begin_read(self, operation: str, count: int, dtype: torch.dtype) -> list[Tensor]:
        """Begin a round with nothing to publish, and return the buffers of all ranks, [count] each."""
        self._check_open(operation)
        self.publish()
        return self._buffers(self._round, count, dtype)

    def wait(self, operation: str, other: int) -> None:
        """Wait until rank `other` has reached this round, so that its buffer can be read."""
        self._wait(operation, other, self._round)

    def barrier(self, operation: str) -> None:
        """Wait until all ranks have reached this round."""
        for other in self._others:
            self._wait(operation, other, self._round)

    def join(self, timeout: float) -> None:
        """Take the first round: wait for all ranks before any of them publishes something. Raises `DeadlineExceeded`
        after `timeout` seconds, and `ChannelClosed` as soon as any rank is gone, even one that had joined: others may
        not have found its memory, and then they never join."""
        self.publish()
        words, started, next_check = self._words, time.monotonic(), 0.0
        while missing := [other for other in self._others if words[self._layout.counter(other)] < self._round]:
            waited = time.monotonic() - started
            if waited >= timeout:
                ranks = ", ".join(str(other) for other in missing)
                what = f"{self._kind} ranks {ranks} of {self.size}"
                raise DeadlineExceeded(f"{what} have not joined within {timeout:g} s")
            if self._watcher is not None and waited >= next_check:
                next_check = waited + POLL_INTERVAL_SECONDS
                self._check_ranks("join", UNREACHABLE_ROUND)
            time.sleep(SLEEP_SECONDS)

    def close(self) -> None:
        """Leave; harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self._words[self._layout.left(self.rank)] = 1
        self._views.clear()  # they are addresses of memory that is about to go
        self._region.close()
        if self._watcher is not None:
            self._watcher.close()

    def _check_open(self, operation: str) -> None:
        if self._is_closed:
            raise ChannelClosed(f"{operation}: the group was closed")

    def _wait(self, operation: str, other: int, number: int) -> None:
        """Wait until rank `other` has reached round `number`."""
        words, word = self._words, self._layout.counter(other)
        if (seen := words[word]) < number:
            started = time.monotonic()
            next_check = POLL_INTERVAL_SECONDS if self._watcher is not None else self._timeout
            while (seen := words[word]) < number:
                waited = time.monotonic() - started
                if waited < SPIN_SECONDS:
                    os.sched_yield()
                elif waited >= self._timeout:
                    raise DeadlineExceeded(
                        f"{operation}: {self._kind} rank {self.rank} of {self.size} has waited for rank {other} for "
                        f"{self._timeout:g} s"
                    )
                elif waited >= next_check:
                    next_check = waited + POLL_INTERVAL_SECONDS
                    self._check_ranks(operation, number)
                else:
                    time.sleep(SLEEP_SECONDS)
        self._seen[other] = seen

    def _check_ranks(self, operation: str, number: int) -> None:
        """Raise `ChannelClosed` if a rank is gone that has not reached round `number`."""
        assert self._watcher is not None
        exited = self._watcher.exited()
        for other in self._others:
            has_left = self._words[self._layout.left(other)] != 0
            # read the counter only after the rank is known to be gone: it is final then
            if (has_left or other in exited) and self._words[self._layout.counter(other)] < number:
                why = "has left the group" if has_left else f"is gone: process {self._watcher.pids[other]} has ended"
                raise ChannelClosed(f"{operation}: {self._kind} rank {other} of {self.size} {why}")

    def _buffers(self, number: int, count: int, dtype: torch.dtype) -> list[Tensor]:
        key = (count, dtype)
        views = self._views.get(key)
        if views is None:
            if len(self._views) == MAX_VIEWS:
                self._views.clear()
            views = self._views[key] = (self._map(*key, parity=0), self._map(*key, parity=1))
        return views[number & 1]

    def _map(self, count: int, dtype: torch.dtype, *, parity: int) -> list[Tensor]:
        with torch.inference_mode(False):  # tensors that are made in that mode cannot be written to outside of it
            return [
                torch.frombuffer(self._data, dtype=dtype, count=count, offset=self._layout.buffer(rank, parity))
                for rank in range(self.size)
            ]
