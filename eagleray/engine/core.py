"""The engine's heart. Driven by the engine's loop; knows no socket and no torch."""

from __future__ import annotations

from eagleray.engine.pipeline import Pipeline
from eagleray.executor import Executor
from eagleray.scheduler import Output, Scheduler

__all__ = ["EngineCore"]


class EngineCore:
    """A scheduler that decides and an executor that carries it out."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._pipeline = Pipeline(executor, depth=depth)

    def step(self) -> list[Output]:
        """Plan and send what fits into the pipeline, then apply the oldest step: what it tells the clients."""
        while self._pipeline.has_room and (plan := self.scheduler.plan()) is not None:
            self._pipeline.send(plan)
        if not self._pipeline:
            return []
        return self.scheduler.apply(self._pipeline.oldest())
