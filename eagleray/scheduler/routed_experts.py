"""Which experts computed the tokens whose keys and values are in the cache, and what of that is told when. Pure.

Rows are stored by slot of the cache, as keys and values are, so that who finds a block finds its rows. A step that is
planned says whose tokens it reports (`Capture`); when its result is applied, first all of its rows are stored, also
those of runs that are over (their blocks are held until then, and others may have found them), and then every request
is told what it has not been told. So what was told is never told again, whatever is computed again. Steps are applied
in the order of their plans: the rows of a block are there when the first step that reads it is applied, even if the
same step writes it. Owned and driven by the scheduler; which blocks have rows is known to the pool of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from eagleray.messages.arrays import Array
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import RoutedExperts
from eagleray.scheduler.request import Run

__all__ = ["NOTHING", "Capture", "RoutedNews", "RoutedRows"]


class Capture(NamedTuple):
    """What a step reports."""

    parts: list[tuple[Run, int, int]]
    """The experts of a run's tokens at positions start to end - 1."""
    slots: list[int]
    """[tokens of all parts] where they are stored; empty if nothing is."""


NOTHING = Capture([], [])


class RoutedRows:
    """`num_blocks`: those whose rows are kept; 0 if nobody can find a block again."""

    def __init__(self, routing: RoutingInfo, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._row_bytes = routing.row_bytes
        shape = (num_blocks * block_size, routing.num_layers, routing.top_k)
        # calloc'd: memory is taken only by what is stored
        self._rows = np.zeros(shape, routing.dtype)

    def capture(self, num_tokens: Mapping[Run, int]) -> Capture:
        """What a step is to report that has just been planned: all that it computes of requests that want rows."""
        capture, size, is_stored = Capture([], []), self._block_size, len(self._rows) > 0
        for run, count in num_tokens.items():
            if run.request.routed_experts_from is None:
                continue
            end = run.num_computed_tokens
            capture.parts.append((run, end - count, end))
            if is_stored and count == 1:
                capture.slots.append(run.block_ids[(end - 1) // size] * size + (end - 1) % size)
            elif is_stored:
                capture.slots.extend(self._slots(run, end - count, end))
        return capture

    def store(self, capture: Capture, experts: Array) -> RoutedNews:
        """Store what a step reports; what is new to each request.

        `experts`: [tokens of all parts; num_layers; top_k].
        """
        assert experts.dtype == self._rows.dtype
        if capture.slots:
            self._rows[capture.slots] = experts
        return RoutedNews(capture.parts, experts.tobytes(), self._row_bytes, self._read)

    def _read(self, run: Run, start: int, end: int) -> bytes:
        return self._rows[self._slots(run, start, end)].tobytes()

    def _slots(self, run: Run, start: int, end: int) -> list[int]:
        size = self._block_size
        first = start // size
        blocks = run.block_ids[first : -(-end // size)]
        slots = [slot for block in blocks for slot in range(block * size, (block + 1) * size)]
        return slots[start - first * size : end - first * size]


class RoutedNews:
    """What a step reports, for the requests that have not been told. `experts`: of all `parts`. `read(run, start, end)`
    gives rows that were stored before."""

    def __init__(
        self,
        parts: Iterable[tuple[Run, int, int]],
        experts: bytes,
        row_bytes: int,
        read: Callable[[Run, int, int], bytes],
    ) -> None:
        self._parts = iter(parts)
        self._next = next(self._parts, None)
        self._experts = experts
        self._offset = 0
        self._row_bytes = row_bytes
        self._read = read

    def tell(self, run: Run) -> RoutedExperts | None:
        """What is new to its request, which counts as told; None if nothing is, or if the run is over. To be asked for
        every run of the step, in order."""
        if self._next is None or self._next[0] is not run:
            return None
        _, start, end = self._next
        self._next = next(self._parts, None)
        begin = self._offset
        self._offset = begin + (end - start) * self._row_bytes
        request = run.request
        wanted_from = request.routed_experts_from
        if request.run is not run or wanted_from is None or wanted_from >= end:
            return None
        request.routed_experts_from = end
        if wanted_from >= start:
            return RoutedExperts(
                wanted_from, self._experts[begin + (wanted_from - start) * self._row_bytes : self._offset]
            )
        return RoutedExperts(wanted_from, self._read(run, wanted_from, end))  # what was found in the cache, too
