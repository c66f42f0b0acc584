from __future__ import annotations

import math

import numpy as np
import pytest
from engine_fakes import ENGINE, CountingGroup

from eagleray.config.build import build_config
from eagleray.engine import loop
from eagleray.engine.core import join_loads
from eagleray.engine.loop import ExpertLoadReporter
from eagleray.engine.startup import start_engine
from eagleray.executor.executor import Executor
from eagleray.messages.steps import WorkerExpertLoad


def load(*counts: list[int]) -> WorkerExpertLoad:
    return WorkerExpertLoad(np.array(counts, np.int64))


def test_join_loads_layers_are_in_order_of_stages():
    joined = join_loads([load([1, 2], [3, 4]), load(), load([5, 6]), load()], tp_size=2)
    assert joined.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert joined.dtype == np.int64


def test_join_loads_ranks_of_a_stage_are_summed():
    assert join_loads([load([1, 2]), load([3, 4])], tp_size=2).tolist() == [[4, 6]]


def test_join_loads_stage_without_experts_is_skipped():
    assert join_loads([load(), load([3, 4])], tp_size=1).tolist() == [[3, 4]]
    assert join_loads([load()], tp_size=1).shape == (0, 0)


@pytest.fixture
def reporter():
    group = CountingGroup(top_k=2)
    return ExpertLoadReporter(ENGINE, start_engine(build_config(), Executor(group), deadline=math.inf).core)


def test_expert_load_reporter_idle_reports_once(reporter):
    assert reporter.report(is_idle=True) is None
    assert reporter.report(is_idle=False) is None
    assert reporter.report(is_idle=False) is None
    told = reporter.report(is_idle=True)
    assert told is not None
    assert (told.engine, told.counts.shape) == (ENGINE, (2, 4))
    assert reporter.report(is_idle=True) is None


def test_expert_load_reporter_busy_reports_at_intervals(reporter, monkeypatch):
    monkeypatch.setattr(loop, "EXPERT_LOAD_INTERVAL_SECONDS", 0.0)
    assert all(reporter.report(is_idle=False) is not None for _ in range(2))


def test_expert_load_reporter_new_client_makes_report_due(reporter):
    reporter.report_soon()
    assert reporter.report(is_idle=True) is not None
    assert reporter.report(is_idle=True) is None
