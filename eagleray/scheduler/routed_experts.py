"""Routed experts of the tokens in the cache, and delivery of each to its request exactly once. Pure.

Routed experts are stored by cache slot, as keys and values are, so that whoever finds a block finds its experts. A step
reports the experts of all tokens that it computes of requests that want them. When its result is applied, first all of
them are stored, also those of ended runs (their blocks are held until then, and other requests may have found them),
and then every request is sent the experts that it has not been sent. So nothing is sent twice, whatever is computed
again. Steps are applied in the order of their plans: the experts of a block are stored when the first step that reads
it is applied, even if the same step writes it. Owned and driven by the scheduler; the block pool knows which blocks
have routed experts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from eagleray.messages.membership import RoutingInfo
from eagleray.messages.steps import StepResult
from eagleray.scheduler.request import Run


class RoutedExpertsStore:
    """Store for `num_blocks` cache blocks; 0 if no block can be found again (prefix caching is off)."""

    def __init__(self, routing: RoutingInfo, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_bytes = routing.row_bytes
        shape = (num_blocks * block_size, routing.num_layers, routing.top_k)
        # zeros are not backed by memory until they are written
        self._by_slot = np.zeros(shape, routing.dtype)

    def store(self, result: StepResult, runs: Mapping[Run, tuple[int, int]]) -> list[bytes]:
        """Store the experts that a step reports and return, for each run, the part that its request has not been sent.

        They count as sent; an ended run gets none. `runs`: the runs of the step in the order of its plan, with the
        number of tokens that it computed of each, and how many first ones of these are the request's: the others are
        drafts that were not accepted.
        """
        experts = result.routed_experts
        reported = b"" if experts is None else experts.tobytes()
        if experts is not None and len(self._by_slot):
            assert experts.dtype == self._by_slot.dtype and result.routed_slots is not None
            self._by_slot[result.routed_slots] = experts
        token_bytes, last = self._token_bytes, 0
        deltas: list[bytes] = []
        for run, (num_tokens, num_kept) in runs.items():
            request = run.request
            wanted_from = request.routed_experts_from
            if wanted_from is None:
                deltas.append(b"")
                continue
            first, last = last, last + num_tokens * token_bytes
            start = run.num_reported_tokens
            run.num_reported_tokens = end = start + num_kept
            if wanted_from >= end or request.run is not run:
                deltas.append(b"")
                continue
            request.routed_experts_from = end
            if wanted_from < start:  # includes tokens found in the cache
                deltas.append(self._by_slot[self._slots(run, wanted_from, end)].tobytes())
            else:
                deltas.append(reported[first + (wanted_from - start) * token_bytes : first + num_kept * token_bytes])
        assert last == len(reported), f"the step reports {len(reported)} bytes of routed experts, not {last}"
        return deltas

    def _slots(self, run: Run, start: int, end: int) -> list[int]:
        size = self._block_size
        first = start // size
        blocks = run.block_ids[first : -(-end // size)]
        slots = [slot for block in blocks for slot in range(block * size, (block + 1) * size)]
        return slots[start - first * size : end - first * size]
