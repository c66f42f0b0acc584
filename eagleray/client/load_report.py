"""Reports of the load of a client and of its engines, for the autoscaler of the fleet.

Owned by the client, which sends one once a second. Times are those of `time.perf_counter`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from eagleray.client.in_flight import InFlightRequests
from eagleray.client.request import ClientRequest
from eagleray.identity import ClientId
from eagleray.messages.outputs import EngineStats
from eagleray.messages.scaling import EngineLoadReport, LoadReport


class LoadReporter:
    """`target_ttft`: seconds after which a first token is late; None: none is."""

    def __init__(
        self,
        client: ClientId,
        *,
        in_flight: InFlightRequests,
        target_ttft: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._client = client
        self._in_flight = in_flight
        self._target_ttft = math.inf if target_ttft is None else target_ttft
        self._clock = clock
        self._newest_join = -math.inf
        """Time at which the newest engine joined."""
        self._num_first_tokens = self._num_late = 0
        in_flight.on_first_token = self._on_first_token

    def on_engine_joined(self) -> None:
        """Count from now on only requests that arrive later."""
        self._newest_join = self._clock()
        self._num_first_tokens = self._num_late = 0

    def _on_first_token(self, request: ClientRequest) -> None:
        if request.arrived_at >= self._newest_join and request.first_token_at is not None:
            self._num_first_tokens += 1
            self._num_late += request.first_token_at - request.arrived_at > self._target_ttft

    def report(self, stats: Iterable[EngineStats]) -> LoadReport:
        """Return a report, and count first tokens from zero again. `stats`: those of the engines that have joined."""
        report = LoadReport(
            client=self._client,
            engines=[_load(of_engine) for of_engine in stats],
            num_unassigned=self._in_flight.num_unassigned_seqs,
            num_first_tokens=self._num_first_tokens,
            num_late=self._num_late,
            num_overdue=self._in_flight.num_queued_between(self._newest_join, self._clock() - self._target_ttft),
        )
        self._num_first_tokens = self._num_late = 0
        return report


def _load(stats: EngineStats) -> EngineLoadReport:
    return EngineLoadReport(
        engine=stats.engine,
        num_running=stats.num_running,
        num_waiting=max(0, stats.num_waiting - stats.num_deferred),
        cache_usage=1.0 - stats.num_free_kv_blocks / max(1, stats.num_kv_blocks),
        num_prompt_tokens=stats.num_prompt_tokens,
        num_generation_tokens=stats.num_generation_tokens,
    )
