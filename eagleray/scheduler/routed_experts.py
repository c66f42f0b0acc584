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
from typing import NamedTuple

import numpy as np

from eagleray.messages.arrays import Array
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import RoutedExperts
from eagleray.scheduler.request import Run

__all__ = ["Captured", "RoutedRows"]


class Captured(NamedTuple):
    """A step reports the experts of this run's tokens at positions `start` to `end - 1`."""

    run: Run
    start: int
    end: int


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
            Captured(run, run.num_computed_tokens - count, run.num_computed_tokens)
            for run, count in num_tokens.items()
            if run.request.routed_experts_from is not None
        ]

    def take(self, captured: Sequence[Captured], experts: Array) -> dict[Run, RoutedExperts]:
        """Store what a step reports, and count it as told: what is new to each request, for those that still run.

        `experts`: [tokens of all `captured`, in their order; num_layers; top_k].
        """
        assert experts.dtype == self._rows.dtype
        if len(self._rows):
            self._rows[[slot for run, start, end in captured for slot in self._slots(run, start, end)]] = experts
        news: dict[Run, RoutedExperts] = {}
        data, size, offset = experts.tobytes(), self._row_bytes, 0
        for run, start, end in captured:
            wanted_from = run.request.routed_experts_from
            if run.is_current and wanted_from is not None and wanted_from < end:
                if wanted_from >= start:
                    rows = data[(offset + wanted_from - start) * size : (offset + end - start) * size]
                else:  # what was found in the cache, too
                    rows = self._rows[self._slots(run, wanted_from, end)].tobytes()
                news[run] = RoutedExperts(wanted_from, rows)
                run.request.routed_experts_from = end
            offset += end - start
        return news

    def _slots(self, run: Run, start: int, end: int) -> list[int]:
        size = self._block_size
        first = start // size
        if end - start == 1:
            return [run.block_ids[first] * size + start % size]
        blocks = run.block_ids[first : -(-end // size)]
        slots = [slot for block in blocks for slot in range(block * size, (block + 1) * size)]
        return slots[start - first * size : end - first * size]
