"""Load and totals of the engines, read from their newest stats at each scrape. Every API server receives all of
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagleray.messages.outputs import EngineStats

LABELS = ("model_name", "engine")

Reading = tuple[str, str, Callable[[EngineStats], float]]

GAUGES: list[Reading] = [
    ("num_requests_running", "Requests that are being computed.", lambda stats: stats.num_running),
    ("num_requests_waiting", "Requests that wait to be computed.", lambda stats: stats.num_waiting),
    (
        "kv_cache_usage_perc",
        "Part of the KV cache in use; 1 is all.",
        lambda stats: (stats.num_kv_blocks - stats.num_free_kv_blocks) / max(1, stats.num_kv_blocks),
    ),
]

# All but the last begin again with each incarnation of an engine, as Prometheus expects it of a process.
COUNTERS: list[Reading] = [
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda stats: stats.num_prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda stats: stats.num_prefix_hits),
    ("num_preemptions", "Requests put back to wait because the cache was full.", lambda stats: stats.num_preemptions),
    (
        "prompt_tokens",
        "Prompt tokens processed, computed or found in the prefix cache.",
        lambda stats: stats.num_prompt_tokens + stats.num_prefix_hits,
    ),
    ("generation_tokens", "Tokens generated.", lambda stats: stats.num_generation_tokens),
    ("engine_steps", "Steps of the engine.", lambda stats: stats.num_steps),
    ("engine_restarts", "How often the engine was started again.", lambda stats: stats.engine.incarnation),
]


class EngineCollector(Collector):
    """Collector that omits engines without stats, because a zero would claim an idle engine."""

    def __init__(self, model_name: str, stats: Callable[[], Iterable[EngineStats]]) -> None:
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        # The newest incarnation is the last of its rank: two series of one name would spoil the whole scrape.
        in_order = sorted(self._stats(), key=lambda stats: (stats.engine.rank, stats.engine.incarnation))
        engines = {str(stats.engine.rank): stats for stats in in_order}
        if not engines:
            return
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(f"eagleray:{name}", text, labels=LABELS)
            for rank, stats in engines.items():
                gauge.add_metric((self._model_name, rank), read(stats))
            yield gauge
        for name, text, read in COUNTERS:
            counter = CounterMetricFamily(f"eagleray:{name}", text, labels=LABELS)
            for rank, stats in engines.items():
                counter.add_metric((self._model_name, rank), read(stats))
            yield counter
