"""Load and totals of an engine, read from its newest stats at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagleray.messages.outputs import EngineStats

__all__ = ["EngineCollector"]

LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """Reports nothing while there are no stats: a zero would claim an idle engine."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats | None]) -> None:
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        labels = (self._model_name, str(stats.engine.rank))
        for name, text, value in _gauges(stats):
            gauge = GaugeMetricFamily(f"eagleray:{name}", text, labels=LABELS)
            gauge.add_metric(labels, value)
            yield gauge
        for name, text, value in _counters(stats):
            counter = CounterMetricFamily(f"eagleray:{name}", text, labels=LABELS)
            counter.add_metric(labels, value)
            yield counter


def _gauges(stats: EngineStats) -> list[tuple[str, str, float]]:
    num_used = stats.num_kv_blocks - stats.num_free_kv_blocks
    return [
        ("num_requests_running", "Requests that are being computed.", stats.num_running),
        ("num_requests_waiting", "Requests that wait to be computed.", stats.num_waiting),
        ("kv_cache_usage_perc", "Part of the KV cache in use; 1 is all.", num_used / max(1, stats.num_kv_blocks)),
    ]


def _counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    return [
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_queries),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_prefix_hits),
        ("num_preemptions", "Requests put back to wait because the cache was full.", stats.num_preemptions),
        (
            "prompt_tokens",
            "Prompt tokens processed, computed or found in the prefix cache.",
            stats.num_prompt_tokens + stats.num_prefix_hits,
        ),
        ("generation_tokens", "Tokens generated.", stats.num_generation_tokens),
        ("engine_steps", "Steps of the engine.", stats.num_steps),
    ]
