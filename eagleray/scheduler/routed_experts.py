"""Which experts computed the tokens whose keys and values are in the cache, and what of that is told when. Pure.

Rows are stored by slot of the cache, as keys and values are, so that who finds a block finds its rows. A step that is
planned says whose tokens it reports (`Captured`); when its result is applied, first all of its rows are stored, also
those of runs that are over (their blocks are held until then, and others may have found them), and then every request
is told what it has not been told. So what was told is never told again, whatever is computed again. Steps are applied
in the order of their plans: the rows of a block are there when the first step that reads it is applied, even if the
same step writes it. Owned and driven by the scheduler; which blocks have rows is known to the pool of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from eagleray.messages.arrays import Array
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import RoutedExperts
from eagleray.scheduler.request import Run

__all__ = ["Captured", "RoutedRows"]


Captured = tuple[Run, int, int]
"""A step reports the experts of this run's tokens at positions start to end - 1. Not a class of its own: one is made
for every token of every request."""


class RoutedRows:
    """`num_blocks`: those whose rows are kept; 0 if nobody can find a block again."""

    def __init__(self, routing: RoutingInfo, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._row_bytes = routing.row_bytes
        shape = (num_blocks * block_size, routing.num_layers, routing.top_k)
        # calloc'd: memory is taken only by what is stored
        self._rows = np.zeros(shape, routing.dtype)

    @staticmethod
    def captured(num_tokens: Mapping[Run, int]) -> list[Captured]:
        """What a step is to report that has just been planned: all that it computes of requests that want rows."""
        return [
            (run, run.num_computed_tokens - count, run.num_computed_tokens)
            for run, count in num_tokens.items()
            if run.request.routed_experts_from is not None
        ]

    def take(self, captured: Sequence[Captured], experts: Array) -> dict[Run, RoutedExperts]:
        """Store what a step reports, and count it as told: what is new to each request, for those that still run.

        `experts`: [tokens of all `captured`, in their order; num_layers; top_k].
        """
        assert experts.dtype == self._rows.dtype
        if len(self._rows):
            self._rows[self._all_slots(captured)] = experts
        news: dict[Run, RoutedExperts] = {}
        data, size, offset = experts.tobytes(), self._row_bytes, 0
        for run, start, end in captured:
            request = run.request
            wanted_from, rows = request.routed_experts_from, data[offset : (offset := offset + (end - start) * size)]
            if run is not request.run or wanted_from is None or wanted_from >= end:
                continue
            if wanted_from > start:
                rows = rows[(wanted_from - start) * size :]
            elif wanted_from < start:  # what was found in the cache, too
                rows = self._rows[self._slots(run, wanted_from, end)].tobytes()
            news[run] = RoutedExperts(wanted_from, rows)
            request.routed_experts_from = end
        return news

    def _all_slots(self, captured: Sequence[Captured]) -> list[int]:
        size = self._block_size
        slots = []
        for run, start, end in captured:
            if end - start == 1:
                slots.append(run.block_ids[start // size] * size + start % size)
            else:
                slots += self._slots(run, start, end)
        return slots

    def _slots(self, run: Run, start: int, end: int) -> list[int]:
        size = self._block_size
        first = start // size
        blocks = run.block_ids[first : -(-end // size)]
        slots = [slot for block in blocks for slot in range(block * size, (block + 1) * size)]
        return slots[start - first * size : end - first * size]
