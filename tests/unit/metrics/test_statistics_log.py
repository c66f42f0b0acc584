"""The line of statistics in the log."""

from __future__ import annotations

import logging

import msgspec
import pytest

from eagleray.identity import EngineId
from eagleray.messages.outputs import EngineStats
from eagleray.metrics.statistics_log import StatisticsLog


class Setup:
    def __init__(self, caplog):
        caplog.set_level(logging.INFO, logger="eagleray.metrics.statistics_log")
        self._caplog = caplog
        self.engines = []
        self.log = StatisticsLog(lambda: self.engines, 100.0)

    def lines(self, *times):
        self._caplog.clear()
        for now in times:
            self.log.tick(now)
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def setup(caplog):
    return Setup(caplog)


def stats(rank=0, incarnation=0, **counts):
    names = [field.name for field in msgspec.structs.fields(EngineStats) if field.type is int]
    return EngineStats(engine=EngineId("test", rank, incarnation), **{name: counts.get(name, 0) for name in names})


def test_statistics_log_sums_engines_and_shows_rates(setup):
    setup.engines = [stats(num_prompt_tokens=1000, num_generation_tokens=500)]
    assert setup.lines(101.0) == []
    setup.engines = [
        stats(
            num_running=3,
            num_waiting=1,
            num_prompt_tokens=1080,
            num_prefix_hits=20,
            num_prefix_queries=40,
            num_generation_tokens=700,
            num_kv_blocks=100,
            num_free_kv_blocks=60,
        ),
        stats(1, num_running=2, num_generation_tokens=50, num_kv_blocks=100, num_free_kv_blocks=90),
    ]
    expected = "5 running, 1 waiting; tokens/s: 10.0 in, 25.0 out; KV cache 25.0 %, prefix hits 50.0 %"
    assert setup.lines(109.0, 110.0, 111.0) == [expected]


def test_statistics_log_idle_engines_have_no_line(setup):
    assert setup.lines(101.0, 111.0) == []
    setup.engines = [stats(num_generation_tokens=7)]
    assert len(setup.lines(121.0)) == 1  # it has worked, and is done
    assert setup.lines(131.0, 141.0) == []


def test_statistics_log_replaced_engine_counts_from_zero(setup):
    setup.engines = [stats(num_generation_tokens=1000)]
    setup.lines(101.0)
    setup.engines = [stats(incarnation=1, num_generation_tokens=30)]
    assert "3.0 out" in setup.lines(110.0)[0]
