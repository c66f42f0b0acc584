from __future__ import annotations

import numpy as np
import pytest

from eagleray.identity import EngineId, next_incarnation
from eagleray.messages.outputs import ExpertLoad
from eagleray.server.dashboard.expert_window import HALF_LIFE_SECONDS, ExpertWindow
from eagleray.server.dashboard.window import MAX_GAP_SECONDS, CounterWindow, quantile

ENGINE = EngineId("i", 0)


def test_counter_window_increase_is_over_the_window():
    window = CounterWindow[str](3.0)
    assert window.rate("a") is None
    for second in range(10):
        window.add(float(second), {"a": 2.0 * second})
    assert (window.seconds, window.increase, window.rate("a")) == (3.0, {"a": 6.0}, 2.0)


def test_counter_window_one_sample_has_no_rate():
    window = CounterWindow[str](3.0)
    window.add(1.0, {"a": 100.0})
    assert window.increase == {"a": 0.0}
    assert window.rate("a") is None


def test_counter_window_new_counter_counts_from_its_first_sample():
    window = CounterWindow[str](10.0)
    window.add(0.0, {"a": 1.0})
    window.add(1.0, {"a": 1.0, "b": 50.0})
    window.add(2.0, {"b": 54.0})
    assert window.increase == {"b": 4.0}
    assert window.rate("b") == 2.0
    assert window.rate("a") == 0.0


def test_counter_window_gap_drops_older_samples():
    window = CounterWindow[str](60.0)
    window.add(0.0, {"a": 0.0})
    window.add(0.1 + MAX_GAP_SECONDS, {"a": 1000.0})
    assert window.rate("a") is None


@pytest.mark.parametrize(
    ("counts", "part", "value"),
    [
        ([0, 0, 0, 0], 0.5, None),
        ([10, 0, 0, 0], 0.5, 0.5),
        ([0, 10, 0, 0], 0.5, 1.5),
        ([5, 0, 5, 0], 0.5, 1.0),
        ([5, 0, 5, 0], 0.9, 3.6),
        ([0, 0, 0, 7], 0.5, 4.0),
    ],
)
def test_quantile_is_interpolated_in_its_bucket(counts, part, value):
    found = quantile([1.0, 2.0, 4.0], counts, part)
    assert found == value or found == pytest.approx(value)


def report(counts, engine: EngineId = ENGINE) -> ExpertLoad:
    return ExpertLoad(engine=engine, counts=np.array(counts, np.int64))


def test_expert_window_first_reports_count_whole_and_engines_add_up():
    window = ExpertWindow()
    assert window.heat() is None
    window.update(0.0, [report([[30, 10], [0, 0]]), report([[0, 0], [0, 8]], EngineId("i", 1))])
    heat = window.heat()
    assert heat.load == [[150, 50], [0, 200]]
    assert heat.balance == [0.667, 0.5]


def test_expert_window_older_tokens_fade_and_the_same_report_counts_once():
    window = ExpertWindow()
    first = report([[100, 0]])
    window.update(0.0, [first])
    version = window.version
    window.update(1.0, [first])
    assert window.version == version
    window.update(HALF_LIFE_SECONDS, [report([[100, 50]])])
    assert window.version == version + 1
    assert window.heat().load == [[100, 100]]


def test_expert_window_replacement_counts_from_zero():
    window = ExpertWindow()
    window.update(0.0, [report([[1000, 0]])])
    window.update(100 * HALF_LIFE_SECONDS, [report([[0, 4]], next_incarnation(ENGINE))])
    assert window.heat().load == [[0, 200]]


def test_expert_window_idle_layer_is_even():
    window = ExpertWindow()
    window.update(0.0, [report([[0, 0], [1, 1]])])
    assert window.heat().load == [[0, 0], [100, 100]]
    assert window.heat().balance == [1.0, 1.0]
