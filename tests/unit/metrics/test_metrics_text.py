"""Text that Prometheus reads."""

from __future__ import annotations

import math
import time

import msgspec
import numpy as np
import pytest
from metrics_fakes import families, samples
from prometheus_client.parser import text_string_to_metric_families

from eagleray.identity import EngineId
from eagleray.messages.control import InstanceState
from eagleray.messages.distributions import BOUNDS, Distribution, EngineDistributions
from eagleray.messages.outputs import EngineStats, ExpertLoad, FinishReason
from eagleray.metrics.experts import ExpertText
from eagleray.metrics.vllm_names import SHARED_NAMES

ENGINE = EngineId("test", 0)

STATS = EngineStats(
    engine=EngineId("test", 3),
    num_running=4,
    num_waiting=5,
    num_kv_blocks=8,
    num_free_kv_blocks=2,
    num_steps=6,
    num_preemptions=7,
    num_prompt_tokens=100,
    num_generation_tokens=200,
    num_prefix_queries=130,
    num_prefix_hits=30,
    num_grammar_queries=12,
    num_grammar_hits=11,
    num_constrained=3,
)


def of(rank, incarnation=0, **changes):
    return msgspec.structs.replace(STATS, engine=EngineId("test", rank, incarnation), **changes)


def begin(metrics, **changes):
    request = {"arrival": time.perf_counter(), "num_prompt_tokens": 30, "n": 1, "max_tokens": 16}
    return metrics.requests.begin(**request | changes)


def test_engine_collector_reports_stats(make):
    metrics = make([STATS])
    assert families(metrics)["eagleray:num_requests_running"].samples[0].labels == {"model_name": "tiny", "engine": "3"}
    values = samples(metrics)
    expected = {
        "num_requests_running": 4,
        "num_requests_waiting": 5,
        "kv_cache_usage_perc": 0.75,
        "prefix_cache_queries_total": 130,
        "prefix_cache_hits_total": 30,
        "num_preemptions_total": 7,
        "num_requests_constrained": 3,
        "grammar_cache_queries_total": 12,
        "grammar_cache_hits_total": 11,
        "prompt_tokens_total": 130,
        "generation_tokens_total": 200,
        "engine_steps_total": 6,
        "engine_restarts_total": 0,
    }
    assert {name: values[f"eagleray:{name}", "3"] for name in expected} == expected


def test_engine_collector_several_engines_have_labels(make):
    metrics = make([of(1, 2, num_running=7), of(0)])
    values = samples(metrics)
    assert [values["eagleray:num_requests_running", rank] for rank in "01"] == [4, 7]
    assert [values["eagleray:engine_restarts_total", rank] for rank in "01"] == [0, 2]
    assert metrics.text().count(b"# TYPE eagleray:num_requests_running gauge") == 1


def test_engine_collector_two_incarnations_reports_the_newer(make):
    metrics = make([of(0, 1, num_running=9), of(0)])
    assert metrics.text().count(b'eagleray:num_requests_running{engine="0"') == 1
    assert samples(metrics)["eagleray:num_requests_running", "0"] == 9


def test_engine_collector_engine_without_stats_is_omitted(make):
    newest = []
    metrics = make(newest)
    assert not any(name.startswith("eagleray:num_requests") for name in families(metrics))
    newest.append(STATS)
    assert samples(metrics)["eagleray:num_requests_running", "3"] == 4


def distributions(**counted):
    empty = {name: Distribution([0] * (len(bounds) + 1), 0.0) for name, bounds in BOUNDS.items()}
    return EngineDistributions(**empty | counted)


def test_engine_collector_reports_histograms_of_the_engine(make):
    counts = [1, 2, 0, 0, 0, 0, 0, 4]
    values = samples(make([of(2, distributions=distributions(preemptions=Distribution(counts, 99.0)))]))
    buckets = [
        values["eagleray:request_num_preemptions_bucket", "2", bound] for bound in ("1.0", "2.0", "20.0", "+Inf")
    ]
    assert buckets == [1, 3, 3, 7]
    assert values["eagleray:request_num_preemptions_sum", "2"] == 99
    assert values["eagleray:request_num_preemptions_count", "2"] == 7
    assert values["eagleray:request_queue_time_seconds_count", "2"] == 0
    assert values["eagleray:iteration_tokens_total_count", "2"] == 0
    assert values["eagleray:grammar_compile_seconds_count", "2"] == 0


def test_engine_collector_parts_have_vllms_labels(make):
    values = samples(make([of(0, num_deferred=2), of(1)], has_vllm_names=True))
    for prefix in ("eagleray", "vllm"):
        waiting = f"{prefix}:num_requests_waiting_by_reason"
        assert [values[waiting, "0", reason] for reason in ("capacity", "deferred")] == [3, 2]
        assert [values[waiting, "1", reason] for reason in ("capacity", "deferred")] == [5, 0]
        tokens = f"{prefix}:prompt_tokens_by_source_total"
        assert [values[tokens, "0", source] for source in ("local_compute", "local_cache_hit")] == [100, 30]
        assert values[f"{prefix}:prompt_tokens_cached_by_source_total", "0", "device"] == 30


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (InstanceState(), "awake"),
        (InstanceState(pause="keep"), "awake"),
        (InstanceState(asleep=("kv_cache",), sleep_level=1), "weights_offloaded"),
        (InstanceState(asleep=("weights", "kv_cache"), sleep_level=2), "discard_all"),
    ],
)
def test_engine_collector_shows_sleep_state(make, state, expected):
    values = samples(make([of(0), of(1)], state=state))
    names = ("awake", "weights_offloaded", "discard_all")
    for rank in "01":
        assert [name for name in names if values["eagleray:engine_sleep_state", rank, name]] == [expected]


def test_engine_collector_adapters_of_all_engines_are_one_series(make):
    engines = [of(0, running_adapters=("b",)), of(1, running_adapters=("a",), waiting_adapters=("c", "d"))]
    (sample,) = families(make(engines, max_loras=8, has_vllm_names=True))["vllm:lora_requests_info"].samples
    assert sample.labels == {"max_lora": "8", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c,d"}
    assert sample.value == pytest.approx(time.time(), abs=60)
    assert "eagleray:lora_requests_info" not in families(make([of(0)], server=1))


def test_engine_collector_shows_cache_config(make):
    [sample] = families(make([STATS]))["eagleray:cache_config_info"].samples
    assert sample.labels == {"model_name": "tiny", "engine": "3", "num_gpu_blocks": "8", "block_size": "16"}
    assert sample.value == 1


def test_first_token_of_engine_beyond_the_labels_is_other(make):
    metrics = make()
    for rank in (0, 199, 200, 5000):
        begin(metrics).first_token(time.perf_counter(), EngineId("test", rank))
    values = samples(metrics)
    counts = {key[1]: value for key, value in values.items() if key[0] == "eagleray:time_to_first_token_seconds_count"}
    assert counts == {"0": 1, "199": 1, "other": 2}


def test_vllm_names_show_the_same_values(make):
    metrics = make([of(0, distributions=distributions())], max_loras=8, has_vllm_names=True)
    timer = begin(metrics)
    timer.tokens(0, 1, ENGINE)
    timer.finished(0, FinishReason.STOP, 1)
    found = families(metrics)
    shared = {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")}
    assert shared == SHARED_NAMES
    for name in shared:
        ours, theirs = found[f"eagleray:{name}"], found[f"vllm:{name}"]
        assert theirs.type == ours.type
        assert theirs.documentation == ours.documentation
        assert [(sample.name.removeprefix("vllm:"), sample.labels, sample.value) for sample in theirs.samples] == [
            (sample.name.removeprefix("eagleray:"), sample.labels, sample.value) for sample in ours.samples
        ]


def test_vllm_names_are_off_by_default(make):
    assert b"vllm:" not in make([STATS]).text()


def test_request_metrics_longest_completion_is_counted_once(make):
    metrics = make()
    timer = begin(metrics, n=2)
    timer.tokens(0, 3, ENGINE)
    timer.tokens(1, 7, ENGINE)
    timer.finished(1, FinishReason.STOP, 7)
    assert samples(metrics)["eagleray:request_max_num_generation_tokens_count",] == 0
    timer.ended(FinishReason.ABORT)
    values = samples(metrics)
    assert values["eagleray:request_max_num_generation_tokens_sum",] == 7
    assert values["eagleray:request_max_num_generation_tokens_count",] == 1


def test_request_metrics_streamed_request_is_measured(make):
    metrics = make()
    timer = begin(metrics)
    timer.tokens(0, 1, ENGINE)
    timer.tokens(0, 0, ENGINE)
    timer.tokens(0, 1, ENGINE)
    timer.tokens(0, 3, ENGINE)
    timer.finished(0, FinishReason.STOP, 5)
    timer.ended(FinishReason.ABORT)
    values = samples(metrics)
    assert values["eagleray:time_to_first_token_seconds_count", "0"] == 1
    for name, count in [
        ("inter_token_latency_seconds", 2),
        ("request_time_per_output_token_seconds", 1),
        ("e2e_request_latency_seconds", 1),
    ]:
        assert values[f"eagleray:{name}_count",] == count
        assert values[f"eagleray:{name}_sum",] >= 0
    for name, total in [
        ("request_prompt_tokens", 30),
        ("request_generation_tokens", 5),
        ("request_params_n", 1),
        ("request_params_max_tokens", 16),
    ]:
        assert (values[f"eagleray:{name}_count",], values[f"eagleray:{name}_sum",]) == (1, total)
    success = {reason: values["eagleray:request_success_total", reason] for reason in FinishReason}
    assert success == {"stop": 1, "length": 0, "abort": 0, "error": 0, "repetition": 0}


def test_request_metrics_unfinished_completions_get_the_requests_reason(make):
    metrics = make()
    timer = begin(metrics, n=3, max_tokens=None)
    timer.tokens(1, 2, ENGINE)
    timer.finished(1, FinishReason.LENGTH, 2)
    timer.tokens(2, 4, ENGINE)
    timer.ended(FinishReason.ERROR)
    timer.ended(FinishReason.ERROR)
    values = samples(metrics)
    assert values["eagleray:request_success_total", "length"] == 1
    assert values["eagleray:request_success_total", "error"] == 2
    assert values["eagleray:time_to_first_token_seconds_count", "0"] == 1
    assert values["eagleray:request_generation_tokens_sum",] == 6
    assert values["eagleray:request_params_max_tokens_count",] == 0


def test_histogram_bound_is_inclusive(make):
    metrics = make()
    for size in (1, 2, 2, 3, 20, 21):
        begin(metrics, n=size)
    buckets = [samples(metrics)["eagleray:request_params_n_bucket", bound] for bound in ("1.0", "2.0", "5.0", "20.0")]
    assert buckets == [1, 3, 4, 5]
    assert samples(metrics)["eagleray:request_params_n_bucket", "+Inf"] == 6
    assert samples(metrics)["eagleray:request_params_n_sum",] == 49


def test_metrics_http_requests_are_counted_by_route(make):
    metrics = make()
    metrics.requests.http_answered("/live", "GET", 200)
    metrics.requests.http_answered("/live", "GET", 200)
    metrics.requests.http_answered("/live", "GET", 503)
    values = samples(metrics)
    assert values["eagleray:http_requests_total", "GET", "/live", "200"] == 2
    assert values["eagleray:http_requests_total", "GET", "/live", "503"] == 1


def test_recovery_metrics_resumed_and_failed_requests_are_counted(make):
    metrics = make()
    assert samples(metrics)["eagleray:requests_resumed_total",] == 0
    metrics.recovery.on_resumed(3, 120)
    metrics.recovery.on_resumed(1, 5)
    metrics.recovery.on_next_token(0.3)
    metrics.recovery.on_failed(2)
    values = samples(metrics)
    assert values["eagleray:requests_resumed_total",] == 4
    assert values["eagleray:tokens_recomputed_total",] == 125
    assert values["eagleray:requests_given_up_total",] == 2
    assert values["eagleray:time_to_next_token_after_failure_seconds_count",] == 1
    assert values["eagleray:time_to_next_token_after_failure_seconds_bucket", "0.25"] == 0
    assert values["eagleray:time_to_next_token_after_failure_seconds_bucket", "0.5"] == 1


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("time_to_first_token_seconds", [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0]),
        ("inter_token_latency_seconds", [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0]),
        ("e2e_request_latency_seconds", [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0]),
        ("request_prompt_tokens", [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]),
        ("request_params_n", [1, 2, 5, 10, 20, math.inf]),
    ],
)
def test_histogram_buckets_equal_vllms(make, name, bounds):
    metrics = make()
    begin(metrics).tokens(0, 1, ENGINE)
    family = families(metrics)[f"eagleray:{name}"]
    found = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
    assert found[: len(bounds)] == bounds
    assert found[-1] == math.inf


def test_metrics_any_server_reports_totals_of_all(make):
    one, two = make([STATS]), make([STATS], server=1)
    one.requests.http_answered("/live", "GET", 200)
    two.requests.http_answered("/live", "GET", 200)
    two.requests.http_answered("/load", "GET", 200)
    for server in (one, two):
        begin(server).first_token(time.perf_counter(), ENGINE)
    for server in (one, two):
        values = samples(server)
        assert values["eagleray:http_requests_total", "GET", "/live", "200"] == 2
        assert values["eagleray:http_requests_total", "GET", "/load", "200"] == 1
        assert values["eagleray:time_to_first_token_seconds_count", "0"] == 2
        assert values["eagleray:time_to_first_token_seconds_bucket", "0", "+Inf"] == 2
        assert values["eagleray:num_requests_running", "3"] == 4  # an engine's load is one value, whoever tells it
        assert values["eagleray:generation_tokens_total", "3"] == 200


def test_server_processes_are_labelled_by_server(make):
    one, _ = make(), make(server=1)
    values = samples(one)
    assert values["process_resident_memory_bytes", "0"] > 0
    assert values["process_cpu_seconds_total", "1"] > 0
    assert values["process_open_fds", "1"] > 0


def load(rank=0, incarnation=0, *, counts=((4, 0, 2), (3, 3, 3))):
    return ExpertLoad(engine=EngineId("test", rank, incarnation), counts=np.array(counts))


def test_expert_text_load_is_by_layer_and_expert(make):
    metrics = make(expert_load=[load(), load(1, counts=[[0, 0, 0]])])
    values = samples(metrics)
    tokens = {key[1:]: value for key, value in values.items() if key[0] == "eagleray:expert_tokens_total"}
    expected = {("0", str(expert), "0"): count for expert, count in enumerate([4, 0, 2])}
    expected |= {("0", str(expert), "1"): 3 for expert in range(3)} | {
        ("1", str(expert), "0"): 0 for expert in range(3)
    }
    assert tokens == expected
    balance = {key[1:]: value for key, value in values.items() if key[0] == "eagleray:expert_balance"}
    assert balance == {("0", "0"): 0.5, ("0", "1"): 1.0, ("1", "0"): 1.0}
    sample = families(metrics)["eagleray:expert_balance"].samples[0]
    assert sample.labels == {"model_name": "tiny", "engine": "0", "layer": "0"}


def test_expert_text_two_incarnations_reports_the_newer(make):
    assert "eagleray:expert_balance" not in families(make())
    metrics = make(expert_load=[load(0, 1, counts=[[7, 7, 7]] * 2), load(0, 0)], server=1)
    assert metrics.text().count(b'expert_tokens_total{model_name="tiny",engine="0",layer="1",expert="0"} 7\n') == 1
    assert metrics.text().count(b'expert="0"}') == 2


@pytest.mark.parametrize("name", ["plain", 'a "quoted" name', "back\\slash", "two\nlines", "ü"])
def test_expert_text_model_name_is_escaped(name):
    text = ExpertText(name, lambda: [load()]).text()
    for family in text_string_to_metric_families(text):
        assert {sample.labels["model_name"] for sample in family.samples} == {name}
