"""Arrival times of the requests of benchmarks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eagleray.errors import UserError
from eagleray_bench.arrivals import arrival_times


def gaps(*, rate: float, burstiness: float, count: int = 40_000) -> np.ndarray:
    return np.diff(arrival_times(np.random.default_rng(0), count, rate=rate, burstiness=burstiness))


def test_arrival_times_infinite_rate_sends_all_at_once():
    assert arrival_times(np.random.default_rng(0), 3, rate=math.inf) == [0.0, 0.0, 0.0]


def test_arrival_times_start_at_0_in_order():
    times = arrival_times(np.random.default_rng(0), 100, rate=7.0)
    assert times[0] == 0.0
    assert times == sorted(times)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrival_times_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_shape(burstiness):
    found = gaps(rate=20.0, burstiness=burstiness)
    assert found.mean() == pytest.approx(1 / 20, rel=0.03)
    assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.03)


def test_arrival_times_burstiness_1_is_a_poisson_process():
    found = gaps(rate=1.0, burstiness=1.0)
    for seconds in (0.1, 0.7, 2.0):  # exponential gaps
        assert (found > seconds).mean() == pytest.approx(math.exp(-seconds), abs=0.01)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_arrival_times_rate_not_positive_raises(rate):
    with pytest.raises(UserError, match="--request-rate must be greater than 0 requests a second, or inf, but it is"):
        arrival_times(np.random.default_rng(0), 1, rate=rate)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.inf, math.nan])
def test_arrival_times_burstiness_not_positive_raises(burstiness):
    with pytest.raises(UserError, match="--burstiness must be greater than 0"):
        arrival_times(np.random.default_rng(0), 1, rate=1.0, burstiness=burstiness)
