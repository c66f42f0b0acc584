"""Which experts computed the tokens whose keys and values are in the cache, and what of that is told when. Pure.

Rows are stored by slot of the cache, as keys and values are, so that who finds a block finds its rows. A step that is
planned says whose tokens it reports (`Capture`); when its result is applied, first all of its rows are stored, also
those of runs that are over (their blocks are held until then, and others may have found them), and then every request
is told what it has not been told. So what was told is never told again, whatever is computed again. Steps are applied
in the order of their plans: the rows of a block are there when the first step that reads it is applied, even if the
same step writes it. Owned and driven by the scheduler; which blocks have rows is known to the pool of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from eagleray.messages.arrays import Array
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import RoutedExperts
from eagleray.scheduler.request import Run

__all__ = ["NOTHING", "Capture", "RoutedRows"]


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
        parts = [
            (run, run.num_computed_tokens - count, run.num_computed_tokens)
            for run, count in num_tokens.items()
            if run.request.routed_experts_from is not None
        ]
        is_stored, size, slots = len(self._rows) > 0, self._block_size, list[int]()
        for run, start, end in parts if is_stored else ():
            if end - start == 1:
                slots.append(run.block_ids[start // size] * size + start % size)
            else:
                slots.extend(self._slots(run, start, end))
        return Capture(parts, slots)

    def store(self, capture: Capture, experts: Array) -> dict[Run, RoutedExperts]:
        """Store what a step reports; what of it is new to the requests of these runs, which count as told. Runs that
        are over are told nothing.

        `experts`: [tokens of all parts; num_layers; top_k].
        """
        assert experts.dtype == self._rows.dtype
        if capture.slots:
            self._rows[capture.slots] = experts
        reported, row_bytes, offset = experts.tobytes(), self._row_bytes, 0
        news: dict[Run, RoutedExperts] = {}
        for run, start, end in capture.parts:
            begin, offset = offset, offset + (end - start) * row_bytes
            request = run.request
            wanted_from = request.routed_experts_from
            if wanted_from is None or wanted_from >= end or request.run is not run:
                continue
            request.routed_experts_from = end
            if wanted_from >= start:
                rows = reported[begin + (wanted_from - start) * row_bytes : offset]
            else:  # what was found in the cache, too
                rows = self._rows[self._slots(run, wanted_from, end)].tobytes()
            news[run] = RoutedExperts(wanted_from, rows)
        return news

    def _slots(self, run: Run, start: int, end: int) -> list[int]:
        size = self._block_size
        first = start // size
        blocks = run.block_ids[first : -(-end // size)]
        slots = [slot for block in blocks for slot in range(block * size, (block + 1) * size)]
        return slots[start - first * size : end - first * size]
