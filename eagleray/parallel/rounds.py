"""How ranks on one node exchange bytes through memory that all of them map.

The memory holds a number for each rank, and two slots for each rank. An operation is one or more rounds, counted from
1; all ranks take the same rounds, whether they have something to say or not. In round k a rank that has something to
say writes it into its slot k % 2; then every rank sets its own number to k and waits until the numbers of those whose
slots it wants to read are at least k.

Why two slots are enough, without a second wait at the end of a round: a rank's number is k - 1 only after it is done
with round k - 2, reading included. A rank writes its slot of round k, last written in round k - 2, only once all
numbers are at least k - 1, so nobody reads any more what it overwrites. After a round in which it has waited for all
that is known already.

Memory order. Numbers are words of eight bytes, written and read through a `memoryview` of format "Q", one aligned
move each. x86-64 does not reorder a store with an earlier store, nor a load with an earlier load (total store order;
where a large copy uses non-temporal stores, libc ends it with a fence): a rank that sees number k sees the slot too.
And no rank sets its number to k before its loads of earlier rounds are done, since a store is not reordered with an
earlier load. Other processors give no such promise; there groups use gloo (`distributed.py`).

Ranks that end. A rank marks that it leaves; that a process was killed is seen by its descriptor, if the group watches
it. Who waits looks for both now and then, and gives up if a rank is gone that has not come to the round it waits for:
it looks at the number once more after it knows that the rank is gone, so what a rank has said before its end counts,
whoever looks when. Where every round waits for all (`meet`), all ranks that are left give up in the same round: the
first that some rank has not come to. None of them goes beyond it, and each comes to it.
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.parallel.process_watcher import ProcessWatcher
from eagleray.transport.memfd import Region

WORD = 8
LINE_BYTES = 64
"""What a rank says of itself is on a cache line of its own: its number, then whether it has left."""

PAGE_BYTES = 4096
"""Slots begin at a multiple of this, so that all ranks compute sums with the same alignment."""

SPIN_SECONDS = 0.001
"""Ranks compute the same, so usually the others are only microseconds away."""

NAP_SECONDS = 50e-6

LOOK_SECONDS = 0.05
"""How often a rank that waits looks whether the others are still there."""

MAX_VIEWS = 512
"""Shapes whose views of the slots are kept."""


MORE_THAN_ANY = 1 << 63
"""A round that nobody comes to."""


class RoundLayout:
    """Where things are: a line for the nonce, a line for each rank, then the slots."""

    def __init__(self, num_ranks: int, slot_bytes: int) -> None:
        assert slot_bytes % PAGE_BYTES == 0
        self.num_ranks, self.slot_bytes = num_ranks, slot_bytes
        self.data = -(-LINE_BYTES * (1 + num_ranks) // PAGE_BYTES) * PAGE_BYTES
        self.size = self.data + 2 * num_ranks * slot_bytes

    def number(self, rank: int) -> int:
        """Index among the words."""
        return LINE_BYTES // WORD * (1 + rank)

    def left(self, rank: int) -> int:
        """Index among the words."""
        return self.number(rank) + 1

    def slot(self, rank: int, parity: int) -> int:
        """Offset in the data."""
        return (2 * rank + parity) * self.slot_bytes


class Rounds:
    """One rank's end. Owns the memory. `kind`: what the rank is a rank of, for messages. `processes`: those of the
    ranks, if it is to be noticed when they end; owned too."""

    def __init__(
        self,
        region: Region,
        layout: RoundLayout,
        *,
        rank: int,
        timeout: float,
        kind: str = "tensor-parallel",
        processes: ProcessWatcher | None = None,
    ) -> None:
        self.rank = rank
        self.size = layout.num_ranks
        self.slot_bytes = layout.slot_bytes
        self._region = region
        self._layout = layout
        self._timeout = timeout
        self._kind = kind
        self._processes = processes
        self._words = region.words(0, layout.data)
        self._data = region.bytes(layout.data, layout.size - layout.data)
        self._own = layout.number(rank)
        self._others = [other for other in range(self.size) if other != rank]
        self._seen = [0] * self.size  # the last number that was seen of each rank
        self._round = 0
        self._is_closed = False
        self._views: dict[tuple[int, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}

    def begin(self, operation: str, count: int, dtype: torch.dtype) -> list[Tensor]:
        """Begin a round with something to say -> the slots of all ranks, [count] each. Write into this rank's own, then
        `say` it."""
        self._check_open(operation)
        before = self._round
        for other in self._others:
            if self._seen[other] < before:
                self._wait(operation, other, before)
        return self._slots(before + 1, count, dtype)

    def say(self) -> None:
        """What is in this rank's slot of the round is for the others to read now."""
        self._words[self._own] = self._round = self._round + 1

    def listen(self, operation: str, count: int, dtype: torch.dtype) -> list[Tensor]:
        """A round with nothing to say -> the slots of all ranks, [count] each."""
        self._check_open(operation)
        self.say()
        return self._slots(self._round, count, dtype)

    def wait(self, operation: str, other: int) -> None:
        """Until rank `other` has come to this round: its slot can be read then."""
        self._wait(operation, other, self._round)

    def meet(self, operation: str) -> None:
        """Until all ranks have come to this round."""
        for other in self._others:
            self._wait(operation, other, self._round)

    def assemble(self, timeout: float) -> None:
        """The first round: until all ranks are there, before any of them says anything. Raises `DeadlineExceeded`
        after `timeout` seconds, and `ChannelClosed` as soon as any rank is gone, even if it has been there: then others
        may not have found the memory any more, and never come."""
        self.say()
        words, started, look = self._words, time.monotonic(), 0.0
        while missing := [other for other in self._others if words[self._layout.number(other)] < self._round]:
            waited = time.monotonic() - started
            if waited >= timeout:
                ranks = ", ".join(str(other) for other in missing)
                what = f"{self._kind} ranks {ranks} of {self.size}"
                raise DeadlineExceeded(f"{what} have not joined within {timeout:g} s")
            if self._processes is not None and waited >= look:
                look = waited + LOOK_SECONDS
                self._look("join", MORE_THAN_ANY)
            time.sleep(NAP_SECONDS)

    def close(self) -> None:
        """Leave; harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self._words[self._layout.left(self.rank)] = 1
        self._views.clear()  # they are addresses of memory that is about to go
        self._region.close()
        if self._processes is not None:
            self._processes.close()

    def _check_open(self, operation: str) -> None:
        if self._is_closed:
            raise ChannelClosed(f"{operation}: the group was closed")

    def _wait(self, operation: str, other: int, number: int) -> None:
        """Until rank `other` has come to round `number`."""
        words, word = self._words, self._layout.number(other)
        if (seen := words[word]) < number:
            start = time.monotonic()
            look = LOOK_SECONDS if self._processes is not None else self._timeout
            while (seen := words[word]) < number:
                waited = time.monotonic() - start
                if waited < SPIN_SECONDS:
                    os.sched_yield()
                elif waited >= self._timeout:
                    raise DeadlineExceeded(
                        f"{operation}: {self._kind} rank {self.rank} of {self.size} has waited for rank {other} for "
                        f"{self._timeout:g} s"
                    )
                elif waited >= look:
                    look = waited + LOOK_SECONDS
                    self._look(operation, number)
                else:
                    time.sleep(NAP_SECONDS)
        self._seen[other] = seen

    def _look(self, operation: str, number: int) -> None:
        """Raises `ChannelClosed` if a rank is gone that has not come to round `number`."""
        assert self._processes is not None
        ended = self._processes.ended()
        for other in self._others:
            has_left = self._words[self._layout.left(other)] != 0
            # in this order: its number does not change any more
            if (has_left or other in ended) and self._words[self._layout.number(other)] < number:
                why = "has left the group" if has_left else f"is gone: process {self._processes.pids[other]} has ended"
                raise ChannelClosed(f"{operation}: {self._kind} rank {other} of {self.size} {why}")

    def _slots(self, number: int, count: int, dtype: torch.dtype) -> list[Tensor]:
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
                torch.frombuffer(self._data, dtype=dtype, count=count, offset=self._layout.slot(rank, parity))
                for rank in range(self.size)
            ]
