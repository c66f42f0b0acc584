"""Load and totals of the engines, read from their newest stats at each scrape. Every API server receives all of
them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from eagleray.messages.control import InstanceState
from eagleray.messages.distributions import BOUNDS, Distribution
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import EngineStats
from eagleray.metrics.families import bucket_marks

LABELS = ("model_name", "engine")

Read = Callable[[EngineStats], float]
Reading = tuple[str, str, Read]

GAUGES: list[Reading] = [
    ("num_requests_running", "Requests that are being computed.", lambda stats: stats.num_running),
    ("num_requests_waiting", "Requests that wait to be computed.", lambda stats: stats.num_waiting),
    ("num_requests_constrained", "Running requests whose text follows a grammar.", lambda stats: stats.num_constrained),
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
    ("grammar_cache_queries", "Requests with a grammar.", lambda stats: stats.num_grammar_queries),
    ("grammar_cache_hits", "Requests whose grammar was compiled already.", lambda stats: stats.num_grammar_hits),
    ("num_preemptions", "Requests put back to wait because the cache was full.", lambda stats: stats.num_preemptions),
    (
        "prompt_tokens",
        "Prompt tokens processed, computed or found in the prefix cache.",
        lambda stats: stats.num_prompt_tokens + stats.num_prefix_hits,
    ),
    ("prompt_tokens_cached", "Prompt tokens that were not computed.", lambda stats: stats.num_prefix_hits),
    ("generation_tokens", "Tokens generated.", lambda stats: stats.num_generation_tokens),
    ("spec_decode_num_drafts", "Drafts that were checked, one for each request of a step.", lambda s: s.num_drafts),
    ("spec_decode_num_draft_tokens", "Drafted tokens that were checked.", lambda stats: stats.num_draft_tokens),
    (
        "spec_decode_num_accepted_tokens",
        "Drafted tokens that were generated.",
        lambda stats: stats.num_accepted_tokens,
    ),
    ("engine_steps", "Steps of the engine.", lambda stats: stats.num_steps),
    ("engine_restarts", "How often the engine was started again.", lambda stats: stats.engine.incarnation),
]

PARTS: list[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, str, dict[str, Read]]] = [
    (
        GaugeMetricFamily,
        "num_requests_waiting_by_reason",
        "Requests that wait for room (capacity), or for their grammar, a suspect's turn or the end of a pause "
        "(deferred).",
        "reason",
        {
            "capacity": lambda stats: stats.num_waiting - stats.num_deferred,
            "deferred": lambda stats: stats.num_deferred,
        },
    ),
    (
        CounterMetricFamily,
        "prompt_tokens_by_source",
        "Prompt tokens, by whether they were computed.",
        "source",
        {
            "local_compute": lambda stats: stats.num_prompt_tokens,
            "local_cache_hit": lambda stats: stats.num_prefix_hits,
        },
    ),
    (
        CounterMetricFamily,
        "prompt_tokens_cached_by_source",
        "Prompt tokens that were not computed, by the memory in which they were found.",
        "source",
        {"device": lambda stats: stats.num_prefix_hits},
    ),
]
"""Metrics that a label divides: kind, name, help text, label, and a reading for each value of the label. The values are
those of vLLM."""

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""Values of the label `sleep_state`, by the level of the sleep."""

HISTOGRAMS = {
    "step_tokens": ("iteration_tokens_total", "Tokens of a step, computed for prompts or generated."),
    "prefill_tokens": ("request_prefill_kv_computed_tokens", "Prompt tokens of a request that had to be computed."),
    "queue_time": ("request_queue_time_seconds", "From the arrival of a request in its engine to its admission."),
    "prefill_time": ("request_prefill_time_seconds", "From the admission of a request to its first token."),
    "decode_time": ("request_decode_time_seconds", "From the first token of a request to its end."),
    "inference_time": ("request_inference_time_seconds", "From the admission of a request to its end."),
    "preemptions": ("request_num_preemptions", "Preemptions of a request until its end."),
    "mask_time": ("grammar_mask_seconds", "Time for the masks of allowed tokens of a step with grammars."),
    "grammar_time": ("grammar_compile_seconds", "Time until all workers have compiled a grammar, or refused it."),
}
"""Names and texts of the histograms that engines count, by their fields in the stats."""


class EngineCollector(Collector):
    """Collector that omits engines without stats, because a zero would claim an idle engine.

    `engine_info` is called for the properties of the engines, and returns None before the first one is there; `state`
    is called for the state of the instance. `max_loras`: most adapters that are served; None without adapters.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], Iterable[EngineStats]],
        engine_info: Callable[[], EngineInfo | None],
        state: Callable[[], InstanceState],
        max_loras: int | None,
    ) -> None:
        self._model_name = model_name
        self._stats = stats
        self._engine_info = engine_info
        self._state = state
        self._max_loras = max_loras

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
        for kind, name, text, label, reads in PARTS:
            family = kind(f"eagleray:{name}", text, labels=(*LABELS, label))
            for rank, stats in engines.items():
                for part, read in reads.items():
                    family.add_metric((self._model_name, rank, part), read(stats))
            yield family
        yield _accepted_by_position(self._model_name, engines)
        yield from self._histograms(engines)
        yield self._sleep_state(engines)
        if self._max_loras is not None:
            yield _adapters(engines.values(), self._max_loras)
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

    def _sleep_state(self, engines: Iterable[str]) -> Metric:
        family = GaugeMetricFamily(
            "eagleray:engine_sleep_state",
            "1 for the state of the engine: awake, asleep at level 1 (weights_offloaded) or at level 2 (discard_all).",
            labels=(*LABELS, "sleep_state"),
        )
        state = self._state()
        level = state.sleep_level if state.asleep else 0
        for rank in engines:
            for number, name in enumerate(SLEEP_STATES):
                family.add_metric((self._model_name, rank, name), level == number)
        return family

    def _cache_config(self, engines: Mapping[str, EngineStats], info: EngineInfo) -> Metric:
        family = GaugeMetricFamily(
            "eagleray:cache_config_info",
            "Size of the KV cache, as labels: blocks, and tokens of a block.",
            labels=(*LABELS, "num_gpu_blocks", "block_size"),
        )
        for rank, stats in engines.items():
            family.add_metric((self._model_name, rank, str(stats.num_kv_blocks), str(info.block_size)), 1)
        return family


def _accepted_by_position(model_name: str, engines: Mapping[str, EngineStats]) -> Metric:
    family = CounterMetricFamily(
        "eagleray:spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were generated, by their position in the draft, from 0.",
        labels=(*LABELS, "position"),
    )
    for rank, stats in engines.items():
        for position, count in enumerate(stats.accepted_by_position):
            family.add_metric((model_name, rank, str(position)), count)
    return family


def _adapters(engines: Iterable[EngineStats], max_loras: int) -> Metric:
    """Return the adapters of all engines together in the form of vLLM: names in labels, and the time as the value."""
    engines = list(engines)
    family = GaugeMetricFamily(
        "eagleray:lora_requests_info",
        "Adapters of requests that are computed and that wait, as labels. The value is the time.",
        labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    )
    waiting = {name for stats in engines for name in stats.waiting_adapters}
    running = {name for stats in engines for name in stats.running_adapters}
    family.add_metric((str(max_loras), ",".join(sorted(waiting)), ",".join(sorted(running))), time.time())
    return family
