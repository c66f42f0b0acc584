"""Samples of Prometheus' families as metrics of Ray."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from eagleray.serve.mirrored_samples import growth, mirrored_samples


def test_mirrored_samples_have_names_and_labels_of_the_families():
    counter = CounterMetricFamily("eagleray:prompt_tokens", "Prompt tokens.", labels=("engine",))
    counter.add_metric(("0",), 7.0)
    gauge = GaugeMetricFamily("eagleray:num_requests_running", "Requests.", value=3.0)
    histogram = HistogramMetricFamily("eagleray:ttft_seconds", "Times.", labels=("model_name",))
    histogram.add_metric(("m",), [("0.5", 2.0), ("+Inf", 3.0)], 4.5)
    samples = mirrored_samples([counter, gauge, histogram])
    assert [(sample.name, dict(sample.labels), sample.value, sample.is_counter) for sample in samples] == [
        ("eagleray_prompt_tokens", {"engine": "0"}, 7.0, True),
        ("eagleray_num_requests_running", {}, 3.0, False),
        ("eagleray_ttft_seconds_bucket", {"model_name": "m", "le": "0.5"}, 2.0, False),
        ("eagleray_ttft_seconds_bucket", {"model_name": "m", "le": "+Inf"}, 3.0, False),
        ("eagleray_ttft_seconds_count", {"model_name": "m"}, 3.0, False),
        ("eagleray_ttft_seconds_sum", {"model_name": "m"}, 4.5, False),
    ]
    assert {sample.text for sample in samples} == {"Prompt tokens.", "Requests.", "Times."}


def test_growth_of_a_counter_that_began_again_is_its_value():
    assert (growth(7.0, 5.0), growth(7.0, 7.0), growth(2.0, 7.0)) == (2.0, 0.0, 2.0)
