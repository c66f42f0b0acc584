"""Routed experts of the tokens in the cache, and delivery of each to its request exactly once. Pure.

Routed experts are stored by cache slot, as keys and values are, so that whoever finds a block finds its experts. A step
reports the experts of all tokens that it computes of requests that want them. When its result is applied, first all of
them are stored, also those of ended runs (their blocks are held until then, and other requests may have found them),
and then every request is sent the experts that it has not been sent. So nothing is sent twice, whatever is computed
again. Steps are applied in the order of their plans: the experts of a block are stored when the first step that reads
it is applied, even if the same step writes it. Owned and driven by the scheduler; the block pool knows which blocks
have routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eagleray.messages.membership import RoutingInfo
from eagleray.messages.steps import StepResult
from eagleray.scheduler.request import Run


class RoutedExpertsStore:
    """Store for `num_blocks` cache blocks; 0 if no block can be found again (prefix caching is off)."""

    def __init__(self, routing: RoutingInfo, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._routing = routing
        # The experts of a token are one element, so that numpy copies them, and makes bytes of them, at once.
        self._token_dtype = np.dtype((np.void, routing.row_bytes))
        # zeros are not backed by memory until they are written
        self._by_slot = np.zeros(num_blocks * block_size, self._token_dtype)

    def store(self, result: StepResult) -> list[bytes]:
        """Store the experts that a step reports, and return those of each token, in the order of the plan."""
        experts = result.routed_experts
        if experts is None:
            return []
        assert experts.dtype == self._routing.dtype and result.routed_slots is not None
        by_token = np.ascontiguousarray(experts).reshape(-1).view(self._token_dtype)
        if len(self._by_slot):
            self._by_slot[result.routed_slots] = by_token
        reported: list[Any] = by_token.tolist()  # bytes, since the element has no fields
        return reported

    def take_new(self, run: Run, reported: Sequence[bytes], num_kept: int) -> bytes:
        """Return the routed experts that the request of a run still lacks, and count them as sent. A run that has ended
        gets none.

        reported: the experts of each token that a step computed for the run. num_kept: number of leading tokens that
        belong to the request; the tokens behind them are drafts that were not accepted.
        """
        request = run.request
        wanted_from = request.routed_experts_from
        assert wanted_from is not None and num_kept <= len(reported)
        start = run.num_reported_tokens
        run.num_reported_tokens = end = start + num_kept
        if wanted_from >= end or request.run is not run:
            return b""
        request.routed_experts_from = end
        if wanted_from < start:  # includes tokens found in the cache
            found: bytes = self._by_slot[self._slots(run, wanted_from, end)].tobytes()
            return found
        return b"".join(reported[wanted_from - start : num_kept])

    def _slots(self, run: Run, start: int, end: int) -> list[int]:
        size = self._block_size
        first = start // size
        blocks = run.block_ids[first : -(-end // size)]
        slots = [slot for block in blocks for slot in range(block * size, (block + 1) * size)]
        return slots[start - first * size : end - first * size]
