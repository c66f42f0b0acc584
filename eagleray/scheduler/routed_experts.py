"""Which experts computed the tokens whose keys and values are in the cache, and what of that is told when. Pure.

Rows are stored by slot of the cache, as keys and values are, so that who finds a block finds its rows. A step reports
all that it computes of requests that want rows. When its result is applied, first all of that is stored, also what is
of runs that are over (their blocks are held until then, and others may have found them), and then every request is told
what it has not been told. So what was told is never told again, whatever is computed again. Steps are applied in the
order of their plans: the rows of a block are there when the first step that reads it is applied, even if the same step
writes it. Owned and driven by the scheduler; which blocks have rows is known to the pool of blocks.
"""

from __future__ import annotations

import numpy as np

from eagleray.messages.membership import RoutingInfo
from eagleray.messages.steps import StepResult
from eagleray.scheduler.request import Run

__all__ = ["RoutedRows"]


class RoutedRows:
    """`num_blocks`: those whose rows are kept; 0 if nobody can find a block again."""

    def __init__(self, routing: RoutingInfo, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._row_bytes = routing.row_bytes
        shape = (num_blocks * block_size, routing.num_layers, routing.top_k)
        # calloc'd: memory is taken only by what is stored
        self._rows = np.zeros(shape, routing.dtype)
        self._reported = b""
        self._num_told = 0  # bytes

    def store(self, result: StepResult) -> None:
        """Take in what a step reports. `news` tells it."""
        experts = result.routed_experts
        if experts is None:
            self._reported, self._num_told = b"", 0
            return
        assert experts.dtype == self._rows.dtype
        if len(self._rows):
            assert result.routed_slots is not None
            self._rows[result.routed_slots] = experts
        self._reported, self._num_told = experts.tobytes(), 0

    def news(self, run: Run, num_tokens: int) -> bytes:
        """What is new to the run's request, which counts as told; a run that is over is told nothing. To be asked after
        `store`, once for each run of the step, in the order of the plan.

        `num_tokens`: what the step has computed of it.
        """
        request = run.request
        wanted_from = request.routed_experts_from
        if wanted_from is None:
            return b""
        start = run.num_reported_tokens
        run.num_reported_tokens = end = start + num_tokens
        begin = self._num_told
        self._num_told = begin + num_tokens * self._row_bytes
        if wanted_from >= end or request.run is not run:
            return b""
        request.routed_experts_from = end
        if wanted_from < start:  # what was found in the cache, too
            return self._rows[self._slots(run, wanted_from, end)].tobytes()
        return self._reported[begin + (wanted_from - start) * self._row_bytes : self._num_told]

    def check(self) -> None:
        """All that a step reported was asked for, and all that was asked for was reported."""
        assert self._num_told == len(self._reported), f"{len(self._reported)} bytes of rows, not {self._num_told}"

    def _slots(self, run: Run, start: int, end: int) -> list[int]:
        size = self._block_size
        first = start // size
        blocks = run.block_ids[first : -(-end // size)]
        slots = [slot for block in blocks for slot in range(block * size, (block + 1) * size)]
        return slots[start - first * size : end - first * size]
