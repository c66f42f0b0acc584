"""The engine's heart. Driven by the engine's loop; knows no socket and no torch."""

from __future__ import annotations

from collections.abc import Callable

from eagleray.engine.pipeline import Awaited, Pipeline
from eagleray.errors import DeadlineExceeded
from eagleray.executor import Executor
from eagleray.messages.failure import Failure
from eagleray.messages.outputs import WorkersReturned
from eagleray.messages.requests import CallWorkers
from eagleray.messages.steps import CallExtension, ExtensionReturned
from eagleray.scheduler import Output, Scheduler

__all__ = ["EngineCore"]


class EngineCore:
    """A scheduler that decides and an executor that carries it out."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, depth: int, watchdog_timeout: float) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._pipeline = Pipeline(executor, depth=depth, watchdog_timeout=watchdog_timeout)

    @property
    def awaited(self) -> Awaited | None:
        """The step that is waited for right now. May be asked from any thread."""
        return self._pipeline.awaited

    def call_workers(self, call: CallWorkers) -> WorkersReturned:
        """Call the worker extension on every worker: their values, or the first one's failure."""
        body = CallExtension(call.method, call.arguments)
        try:
            returned = self.executor.gather(body, ExtensionReturned, timeout=call.timeout, until=_has_failed)
        except DeadlineExceeded as error:
            return WorkersReturned(call_id=call.call_id, failure=Failure.of(error))
        for rank, one in returned.items():
            if one.failure is not None:
                return WorkersReturned(call_id=call.call_id, failure=one.failure, rank=rank)
        return WorkersReturned(call_id=call.call_id, values=[one.value or b"" for one in returned.values()])

    def step(self, announce: Callable[[list[Output]], None]) -> list[Output]:
        """Plan and send what fits into the pipeline, then apply the oldest step: what it tells the clients.

        `announce` takes what they must know before a step is sent that may be the end of this engine.
        """
        while self._pipeline.has_room and (plan := self.scheduler.plan()) is not None:
            if notices := self.scheduler.take_notices():
                announce(notices)
            self._pipeline.send(plan)
        if not self._pipeline:
            return []
        return self.scheduler.apply(self._pipeline.oldest())


def _has_failed(returned: ExtensionReturned) -> bool:
    """The others may be waiting for the rank that has failed, and never answer."""
    return returned.failure is not None
