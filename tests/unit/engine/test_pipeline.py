from __future__ import annotations

import pytest
from engine_fakes import CountingGroup

from eagleray.engine import core
from eagleray.engine.core import Pipeline
from eagleray.errors import WorkerLost
from eagleray.executor.executor import Executor
from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import Call, NewRow, Reply, StepPlan


class Watched(CountingGroup):
    """Records the step that the pipeline reports as awaited during each wait."""

    def __init__(self) -> None:
        super().__init__()
        self.pipeline = Pipeline(Executor(self), depth=2, watchdog_timeout=60.0)
        self.seen: list[tuple[str, int, float]] = []

    def send(self, call: Call) -> None:
        self._note("send")
        super().send(call)

    def receive(self, timeout: float) -> Reply | None:
        self._note("receive")
        return super().receive(timeout)

    def _note(self, where: str) -> None:
        assert self.pipeline.awaited is not None
        self.seen.append((where, self.pipeline.awaited.plan.step, self.pipeline.awaited.seconds))


def plan(step: int, *num_tokens: int) -> StepPlan:
    starts = [
        NewRow(
            row=row,
            request_id=str(row),
            token_ids=[1] * count,
            num_prompt_tokens=count,
            num_computed_tokens=0,
            block_ids=[row],
            sampling=Sampling(seed=0),
        )
        for row, count in enumerate(num_tokens)
    ]
    rows = list(range(len(num_tokens)))
    return StepPlan(step=step, freed_rows=[], new_rows=starts, new_blocks=[], rows=rows, num_tokens=list(num_tokens))


def test_pipeline_awaited_step_has_its_limit():
    group = Watched()
    pipeline = group.pipeline
    pipeline.send(plan(0, 1, 510))
    assert pipeline.awaited is None
    pipeline.send(plan(1, 500, 12))
    assert not pipeline.has_room
    assert pipeline.oldest().step == 0
    assert pipeline.awaited is None
    pipeline.send(plan(2, 1024))
    assert [pipeline.oldest().step, pipeline.oldest().step] == [1, 2]
    assert group.seen == [
        ("send", 0, 60.0),
        ("send", 1, 120.0),
        ("receive", 0, 60.0),
        ("send", 2, 180.0),
        ("receive", 1, 120.0),
        ("receive", 2, 180.0),
    ]


def test_pipeline_after_error_awaits_nothing():
    group = Watched()
    group.dies_at_step = 0
    with pytest.raises(WorkerLost):
        group.pipeline.send(plan(0, 1))
    assert group.pipeline.awaited is None


def test_pipeline_least_tokens_raises_the_limit():
    group = CountingGroup()
    pipeline = Pipeline(Executor(group), depth=2, watchdog_timeout=60.0, least_tokens=1024)
    pipeline.send(plan(0, 1))
    pipeline.send(plan(1, 2000))
    assert pipeline.seconds == 60.0 + 180.0 + 240.0
    pipeline.drop()
    assert (len(pipeline), pipeline.seconds) == (0, 60.0)


def test_pipeline_step_that_awaited_tokens_its_time_begins_at_their_result(monkeypatch):
    now = 0.0
    monkeypatch.setattr(core.time, "monotonic", lambda: now)
    pipeline = Pipeline(Executor(CountingGroup()), depth=2, watchdog_timeout=60.0)
    seconds = []
    for step, awaits_tokens in enumerate([False, True, False]):
        pipeline.awaits_tokens = awaits_tokens
        now += 1.0
        pipeline.send(plan(step, 1))
        now += 4.0
        pipeline.oldest()
        seconds.append(pipeline.step_seconds)
    assert seconds == [4.0, 5.0, 4.0]
