"""Counters of the last minute: those of all API servers, from the ledger, and those of the engines.

Owned by `DashboardFeed`, which samples while somebody watches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from eagleray.client.client import Client
from eagleray.identity import EngineId
from eagleray.messages.outputs import EngineStats
from eagleray.metrics.families import SUM, Histogram
from eagleray.metrics.ledger import IN_FLIGHT, PROCESS, Labels, Ledger
from eagleray.metrics.requests import RequestMetrics
from eagleray.server.dashboard.state import LatencySummary
from eagleray.server.dashboard.window import CounterWindow, quantile

RATE_SECONDS = 5.0
SUMMARY_SECONDS = 60.0

Counter = tuple[str | EngineId, Labels]
"""A family of the ledger with label values, or an engine with the name of one of its counters."""


class EngineRates(NamedTuple):
    """Tokens per second; None before a second was observed."""

    prompt_tokens: float | None
    generation_tokens: float | None


class Sampler:
    """`ledger` has the counts of all API servers; `client` has the reports of all engines."""

    def __init__(self, client: Client, metrics: RequestMetrics, ledger: Ledger) -> None:
        self.pids: dict[int, int] = {}
        """Process ids by the index of the API server."""
        self.num_in_flight: dict[int, int] = {}
        """Requests that each API server had not answered about a second ago."""
        self._client = client
        self._metrics = metrics
        self._ledger = ledger
        self._rates: CounterWindow[Counter] = CounterWindow(RATE_SECONDS)
        self._minute: CounterWindow[Counter] = CounterWindow(SUMMARY_SECONDS)
        self._names = {metrics.success.name, metrics.first_token.name, metrics.per_token.name}

    def sample(self, now: float) -> None:
        """Read all counters, at a time of any steady clock."""
        counters: dict[Counter, float] = {}
        for server, records in self._ledger.servers().items():
            self.pids[server] = int(records.get((PROCESS,), 0))
            self.num_in_flight[server] = int(records.get((IN_FLIGHT,), 0))
            for (name, *labels), count in records.items():
                if name in self._names:
                    counter = name, tuple(labels)
                    counters[counter] = counters.get(counter, 0.0) + count
        for engine, stats in self._client.stats.items():
            counters |= {(engine, (name,)): count for name, count in _engine_counts(stats).items()}
        self._rates.add(now, counters)
        self._minute.add(now, counters)

    def engine_rates(self, engine: EngineId) -> EngineRates:
        """Return the tokens of one engine per second."""
        return EngineRates(self._rates.rate((engine, ("prompt",))), self._rates.rate((engine, ("generation",))))

    @property
    def total_rates(self) -> EngineRates:
        """Tokens of all engines per second."""
        each = [self.engine_rates(engine) for engine in self._client.stats]
        if not self._rates.seconds:
            return EngineRates(None, None)
        return EngineRates(
            sum(rates.prompt_tokens or 0.0 for rates in each), sum(rates.generation_tokens or 0.0 for rates in each)
        )

    @property
    def requests_per_second(self) -> float | None:
        """Number of completions that ended per second; None before a second was observed."""
        if not self._rates.seconds:
            return None
        name = self._metrics.success.name
        return sum(count for (family, _), count in self._rates.increase.items() if family == name) / self._rates.seconds

    @property
    def cache_hits(self) -> float | None:
        """Part of the prompt tokens of the last minute that the prefix caches had; None without prompts."""
        hits, queries = (
            sum(self._minute.increase.get((engine, (name,)), 0.0) for engine in self._client.stats)
            for name in ("hits", "queries")
        )
        return hits / queries if queries else None

    @property
    def time_to_first_token(self) -> LatencySummary:
        return _latency(self._metrics.first_token, self._minute.increase)

    @property
    def time_per_output_token(self) -> LatencySummary:
        return _latency(self._metrics.per_token, self._minute.increase)


def _engine_counts(stats: EngineStats) -> dict[str, float]:
    return {
        "prompt": stats.num_prompt_tokens + stats.num_prefix_hits,
        "generation": stats.num_generation_tokens,
        "queries": stats.num_prefix_queries,
        "hits": stats.num_prefix_hits,
    }


def _latency(histogram: Histogram, increase: Mapping[Counter, float]) -> LatencySummary:
    """Summarize what a histogram has counted, over all values of its labels."""
    by_mark = dict.fromkeys((*histogram.marks, SUM), 0.0)
    for (family, labels), number in increase.items():
        if family == histogram.name:
            by_mark[labels[-1]] += number
    total = by_mark.pop(SUM)
    counts = list(by_mark.values())
    count = round(sum(counts))
    return LatencySummary(
        count=count,
        mean=total / count if count else None,
        p50=quantile(histogram.bounds, counts, 0.5),
        p95=quantile(histogram.bounds, counts, 0.95),
    )
