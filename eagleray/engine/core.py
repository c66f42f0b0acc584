"""The engine's heart. Driven by the engine's loop; knows no socket and no torch."""

from __future__ import annotations

from collections.abc import Callable

from eagleray.engine.pipeline import AwaitedStep, Pipeline
from eagleray.engine.waves import Waves
from eagleray.errors import DeadlineExceeded
from eagleray.executor.executor import Executor
from eagleray.messages.failure import Failure
from eagleray.messages.outputs import WorkersReturned
from eagleray.messages.requests import CallWorkers
from eagleray.messages.steps import CallExtension, ExtensionReturned, ReadExpertLoad, StepPlan, WorkerExpertLoad
from eagleray.scheduler.request import AddressedChunk
from eagleray.scheduler.scheduler import Scheduler


class EngineCore:
    """A scheduler that decides and an executor that carries it out.

    `waves`: of an engine that steps together with others; `least_tokens`: see `Pipeline`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int,
        watchdog_timeout: float,
        waves: Waves | None = None,
        least_tokens: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.waves = waves
        self._pipeline = Pipeline(executor, depth=depth, watchdog_timeout=watchdog_timeout, least_tokens=least_tokens)

    @property
    def awaited(self) -> AwaitedStep | None:
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

    def step(self, announce: Callable[[list[AddressedChunk]], None]) -> list[AddressedChunk]:
        """Plan and send what fits into the pipeline, then apply the oldest step: what it tells the clients.

        `announce` takes what they must know before a step is sent that may be the end of this engine. Raises
        `ExpertGroupBroken` if an engine is gone that steps together with this one: then `drop_steps` is to be called.
        """
        while self._pipeline.has_room and (plan := self._plan()) is not None:
            if notices := self.scheduler.pop_early_chunks():
                announce(notices)
            self._pipeline.send(plan)
        if not self._pipeline:
            return []
        result = self._pipeline.oldest()
        if self.waves is not None:
            self.waves.returned(any_engine_busy=result.any_engine_busy)
        return self.scheduler.apply(result)

    def drop_steps(self) -> None:
        """What is in flight will not be completed: it is planned anew, in a wave of another group."""
        assert self.waves is not None, "steps are lost together with an engine that shares them"
        self._pipeline.drop()
        self.executor.forget_steps()
        self.waves.end()
        self.scheduler.rewind()

    def read_expert_load(self) -> list[WorkerExpertLoad]:
        """Of every worker, by rank. Waits for the steps in flight."""
        return self.executor.call(ReadExpertLoad(), WorkerExpertLoad, timeout=self._pipeline.seconds)

    def _plan(self) -> StepPlan | None:
        """The next step, if there is one. Of a wave there always is."""
        if self.waves is None:
            return self.scheduler.plan()
        if not self.waves.may_send:
            return None
        self.waves.sent()
        return self.scheduler.plan() or self.scheduler.idle_plan()


def _has_failed(returned: ExtensionReturned) -> bool:
    """The others may be waiting for the rank that has failed, and never answer."""
    return returned.failure is not None
