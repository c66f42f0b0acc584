"""Load and totals of the engines, read from their newest stats at each scrape. Every API server receives all of
them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from eagleray.messages.distributions import BOUNDS, Distribution
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import EngineStats
from eagleray.metrics.families import bucket_marks

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
    ("prompt_tokens_cached", "Prompt tokens that were not computed.", lambda stats: stats.num_prefix_hits),
    ("generation_tokens", "Tokens generated.", lambda stats: stats.num_generation_tokens),
    ("engine_steps", "Steps of the engine.", lambda stats: stats.num_steps),
    ("engine_restarts", "How often the engine was started again.", lambda stats: stats.engine.incarnation),
]

HISTOGRAMS = {
    "step_tokens": ("iteration_tokens_total", "Tokens of a step, computed for prompts or generated."),
    "queue_time": ("request_queue_time_seconds", "From the arrival of a request in its engine to its admission."),
    "prefill_time": ("request_prefill_time_seconds", "From the admission of a request to its first token."),
    "decode_time": ("request_decode_time_seconds", "From the first token of a request to its end."),
    "inference_time": ("request_inference_time_seconds", "From the admission of a request to its end."),
    "preemptions": ("request_num_preemptions", "Preemptions of a request until its end."),
}
"""Names and texts of the histograms that engines count, by their fields in the stats."""


class EngineCollector(Collector):
    """Collector that omits engines without stats, because a zero would claim an idle engine.

    `engine_info` is called for the properties of the engines, and returns None before the first one is there.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], Iterable[EngineStats]],
        engine_info: Callable[[], EngineInfo | None],
    ) -> None:
        self._model_name = model_name
        self._stats = stats
        self._engine_info = engine_info

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
        yield from self._histograms(engines)
        if (info := self._engine_info()) is not None:
            yield self._cache_config(engines, info)

    def _histograms(self, engines: Mapping[str, EngineStats]) -> Iterator[Metric]:
        for field, (name, text) in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"eagleray:{name}", text, labels=LABELS)
            for rank, stats in engines.items():
                if stats.distributions is None:
                    continue
                counted: Distribution = getattr(stats.distributions, field)
                sums = itertools.accumulate(counted.counts)
                buckets = list(zip(bucket_marks(BOUNDS[field]), sums, strict=True))
                family.add_metric((self._model_name, rank), buckets, counted.total)
            yield family

    def _cache_config(self, engines: Mapping[str, EngineStats], info: EngineInfo) -> Metric:
        family = GaugeMetricFamily(
            "eagleray:cache_config_info",
            "Size of the KV cache, as labels: blocks, and tokens of a block.",
            labels=(*LABELS, "num_gpu_blocks", "block_size"),
        )
        for rank, stats in engines.items():
            family.add_metric((self._model_name, rank, str(stats.num_kv_blocks), str(info.block_size)), 1)
        return family
