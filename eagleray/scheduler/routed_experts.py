"""Which experts computed the tokens whose keys and values are in the cache, and what of that is told when. Pure.

Rows are stored by slot of the cache, as keys and values are, so that who finds a block finds its rows. A step reports
all that it computes of requests that want rows. When its result is applied, first all of that is stored, also what is
of runs that are over (their blocks are held until then, and others may have found them), and then every request is told
what it has not been told. So what was told is never told again, whatever is computed again. Steps are applied in the
order of their plans: the rows of a block are there when the first step that reads it is applied, even if the same step
writes it. Owned and driven by the scheduler; which blocks have rows is known to the pool of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from eagleray.messages.membership import RoutingInfo
from eagleray.messages.steps import StepResult
from eagleray.scheduler.request import Run


class RoutedExpertsStore:
    """`num_blocks`: those whose rows are kept; 0 if nobody can find a block again."""

    def __init__(self, routing: RoutingInfo, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._row_bytes = routing.row_bytes
        shape = (num_blocks * block_size, routing.num_layers, routing.top_k)
        # calloc'd: memory is taken only by what is stored
        self._rows = np.zeros(shape, routing.dtype)

    def store(self, result: StepResult, runs: Mapping[Run, int]) -> list[bytes]:
        """Take in what a step reports: what of it is new to the request of each run, in their order. It counts as told;
        a run that is over is told nothing.

        `runs`: of the step, in the order of its plan, with the number of tokens that it has computed of each.
        """
        experts = result.routed_experts
        reported = b"" if experts is None else experts.tobytes()
        if experts is not None and len(self._rows):
            assert experts.dtype == self._rows.dtype and result.routed_slots is not None
            self._rows[result.routed_slots] = experts
        row_bytes, last = self._row_bytes, 0
        news: list[bytes] = []
        for run, num_tokens in runs.items():
            request = run.request
            wanted_from = request.routed_experts_from
            if wanted_from is None:
                news.append(b"")
                continue
            first, last = last, last + num_tokens * row_bytes
            start = run.num_reported_tokens
            run.num_reported_tokens = end = start + num_tokens
            if wanted_from >= end or request.run is not run:
                news.append(b"")
                continue
            request.routed_experts_from = end
            if wanted_from < start:  # what was found in the cache, too
                news.append(self._rows[self._slots(run, wanted_from, end)].tobytes())
            else:
                news.append(reported[first + (wanted_from - start) * row_bytes : last])
        assert last == len(reported), f"the step reports {len(reported)} bytes of rows, not {last}"
        return news

    def _slots(self, run: Run, start: int, end: int) -> list[int]:
        size = self._block_size
        first = start // size
        blocks = run.block_ids[first : -(-end // size)]
        slots = [slot for block in blocks for slot in range(block * size, (block + 1) * size)]
        return slots[start - first * size : end - first * size]
