"""The engine's heart. Driven by the engine's loop; knows no socket and no torch."""

from __future__ import annotations

from eagleray.executor import Executor
from eagleray.scheduler import Output, Scheduler

__all__ = ["EngineCore"]


class EngineCore:
    """A scheduler that decides and an executor that carries it out."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor

    def step(self) -> list[Output]:
        """Plan, execute, apply: everything that one step tells the clients."""
        plan = self.scheduler.plan()
        if plan is None:
            return []
        result = self.executor.step(plan).result()
        return self.scheduler.apply(result)
