"""Names of vLLM for the metrics that it has too, beside our own, from the same counts."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

OUR_PREFIX = "eagleray:"
VLLM_PREFIX = "vllm:"

SHARED_NAMES = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "engine_sleep_state",
        "lora_requests_info",
        "admission_rejections",
        "kv_cache_usage_perc",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "prompt_tokens_by_source",
        "prompt_tokens_cached",
        "prompt_tokens_cached_by_source",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_kv_computed_tokens",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
        "request_num_preemptions",
        "iteration_tokens_total",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "cache_config_info",
    }
)
"""Names of families, without prefix and without `_total` of counters, that mean the same in vLLM."""


class WithVllmNames(Collector):
    """Collector of every metric of `collector`, each of `SHARED_NAMES` under both names."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterator[Metric]:
        for metric in self._collector.collect():
            yield metric
            if metric.name.removeprefix(OUR_PREFIX) in SHARED_NAMES:
                yield _renamed(metric)


def _renamed(metric: Metric) -> Metric:
    family = Metric(_renamed_text(metric.name), metric.documentation, metric.type)
    family.samples = [sample._replace(name=_renamed_text(sample.name)) for sample in metric.samples]
    return family


def _renamed_text(name: str) -> str:
    return VLLM_PREFIX + name.removeprefix(OUR_PREFIX)
