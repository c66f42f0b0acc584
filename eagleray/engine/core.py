"""The engine core: one step, from plan to chunks, and the steps in flight. Driven by the engine loop; imports neither
sockets nor torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from eagleray.engine.waves import Waves
from eagleray.errors import DeadlineExceeded
from eagleray.executor.executor import Executor, PendingStep
from eagleray.messages.arrays import Array
from eagleray.messages.failure import Failure
from eagleray.messages.outputs import WorkersReturned
from eagleray.messages.requests import CallWorkers
from eagleray.messages.steps import (
    CallExtension,
    ExtensionReturned,
    ReadExpertLoad,
    StepPlan,
    StepResult,
    WorkerExpertLoad,
)
from eagleray.scheduler.scheduler import Scheduler
from eagleray.scheduler.step_outputs import AddressedChunk, StepOutputs

TOKENS_PER_TIMEOUT = 512
"""A step may take the watchdog's timeout, and as long again for each multiple of this number of tokens, so that a long
prompt is not taken for a hang."""


class AwaitedStep(NamedTuple):
    """A step that the engine waits for, its time limit in seconds, and the monotonic time at which it was sent."""

    plan: StepPlan
    seconds: float
    sent_at: float = 0.0
    begins_at_result: bool = False
    """Whether its time includes that since the result before, because it was not planned ahead for the tokens of it."""


class Pipeline:
    """Up to `depth` steps: one for each pipeline stage, and one more if the next step is sent while one runs.

    Every step gets at least the time limit of a step of `least_tokens` tokens: in an expert group, another engine may
    compute that many in the same step.
    """

    def __init__(self, executor: Executor, *, depth: int, watchdog_timeout: float, least_tokens: int = 0) -> None:
        self._executor = executor
        self._depth = depth
        self._watchdog_timeout = watchdog_timeout
        self._least_tokens = least_tokens
        self._steps: deque[tuple[AwaitedStep, PendingStep]] = deque()
        self._done_at = 0.0
        self.step_seconds = 0.0
        """Time of the last step whose result was received: since it was sent, or since the result before it."""
        self.awaits_tokens = False
        """Whether the next step was not planned ahead, because it needs the tokens of those in flight."""
        self.awaited: AwaitedStep | None = None
        """Step that the engine's thread waits for right now; the watchdog reads it from another thread."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        return len(self._steps) < self._depth

    @property
    def seconds(self) -> float:
        """Time limit, in seconds, of a call that is queued behind all steps in flight."""
        return self._watchdog_timeout + sum(step.seconds for step, _ in self._steps)

    def send(self, plan: StepPlan) -> None:
        """Send a step to the workers. A worker in this process computes it here."""
        self.awaited = step = AwaitedStep(plan, self._seconds(plan), time.monotonic(), self.awaits_tokens)
        self.awaits_tokens = False
        try:
            self._steps.append((step, self._executor.step(plan, seconds=step.seconds)))
        finally:
            self.awaited = None

    def oldest(self) -> StepResult:
        """Wait for the result of the step that was sent first. Raises as `PendingStep.result` does."""
        self.awaited, pending = self._steps.popleft()
        started_at = self._done_at if self.awaited.begins_at_result else max(self.awaited.sent_at, self._done_at)
        try:
            return pending.result()
        finally:
            self.awaited = None
            self._done_at = time.monotonic()
            self.step_seconds = self._done_at - started_at

    def drop(self) -> None:
        """Stop waiting for the steps in flight."""
        self._steps.clear()
        self.awaits_tokens = False

    def _seconds(self, plan: StepPlan) -> float:
        num_tokens = max(plan.total_num_tokens, self._least_tokens)
        return self._watchdog_timeout * (1 + num_tokens // TOKENS_PER_TIMEOUT)


class EngineCore:
    """A scheduler that plans steps and an executor that has the workers compute them.

    `waves` is given for an engine of an expert group. `least_tokens`: see `Pipeline`.
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
        """Step that the engine's thread waits for right now. Safe to read from any thread."""
        return self._pipeline.awaited

    @property
    def is_settled(self) -> bool:
        """Whether no step of a request is in flight, and no wave of the expert group is on."""
        return self.scheduler.is_settled and not (self.waves is not None and self.waves.is_on)

    @property
    def call_seconds(self) -> float:
        """Time limit, in seconds, of a call that is queued behind the steps in flight."""
        return self._pipeline.seconds

    def call_workers(self, call: CallWorkers) -> WorkersReturned:
        """Call the worker extension on every worker and return their values, or the first failure.

        The next step computes with weights that the method loads, so cached blocks of the old weights are hidden. A
        method that failed, or still runs, may have loaded some on any rank.
        """
        body = CallExtension(call.method, call.arguments)
        try:
            returned = self.executor.gather(body, ExtensionReturned, timeout=call.timeout, until=_has_failed)
        except DeadlineExceeded as error:
            self.scheduler.on_weights_loaded()
            return WorkersReturned(call_id=call.call_id, failure=Failure.of(error))
        if any(one.has_loaded_weights or _has_raised(one) for one in returned.values()):
            self.scheduler.on_weights_loaded()
        for rank, one in returned.items():
            if one.failure is not None:
                return WorkersReturned(call_id=call.call_id, failure=one.failure, rank=rank)
        return WorkersReturned(call_id=call.call_id, values=[one.value or b"" for one in returned.values()])

    def step(self, send_early: Callable[[list[AddressedChunk]], None]) -> StepOutputs:
        """Plan and send the steps that fit into the pipeline, then apply the oldest one and return its output.

        `send_early` sends the chunks that clients must receive before a step that may crash this engine. Raises
        `ExpertGroupBroken` if another engine of the expert group exited: the caller must call `drop_steps` then.
        """
        while self._pipeline.has_room and (plan := self._plan()) is not None:
            if chunks := self.scheduler.pop_early_chunks():
                send_early(chunks)
            self._pipeline.send(plan)
        if not self._pipeline:
            return StepOutputs()
        result = self._pipeline.oldest()
        if self.waves is not None:
            self.waves.on_result(any_engine_busy=result.any_engine_busy)
        return self.scheduler.apply(result, seconds=self._pipeline.step_seconds)

    def drop_steps(self) -> None:
        """Drop the steps in flight, which will never complete; they are planned anew in a wave of the next group."""
        assert self.waves is not None, "steps are dropped only in an expert group"
        self._pipeline.drop()
        self.executor.drop_steps()
        self.waves.stop()
        self.scheduler.rewind()

    def read_expert_load(self) -> Array:
        """Return the tokens of each expert, [num_moe_layers, num_experts]. Waits for the steps in flight."""
        loads = self.executor.call(ReadExpertLoad(), WorkerExpertLoad, timeout=self.call_seconds)
        return join_loads(loads, tp_size=self.executor.topology.tensor_parallel_size)

    def _plan(self) -> StepPlan | None:
        """Plan the next step, if there is one and it need not wait for tokens. During a wave there always is one."""
        if self.scheduler.waits_for_tokens:
            self._pipeline.awaits_tokens = True
            return None
        if self.waves is None:
            plan = self.scheduler.plan()
            self._pipeline.awaits_tokens &= plan is not None
            return plan
        if not self.waves.may_send:
            return None
        self.waves.on_sent()
        return self.scheduler.plan() or self.scheduler.idle_plan()


def join_loads(loads: list[WorkerExpertLoad], *, tp_size: int) -> Array:
    """Return int64 [num_moe_layers, num_experts] from the counts of each rank, with layers in the order of the stages.

    Ranks of a stage have counted different tokens, or none.
    """
    stages = [loads[first : first + tp_size] for first in range(0, len(loads), tp_size)]
    counted = [[load.counts for load in stage if load.counts.size] for stage in stages]
    layers: list[Array] = [np.sum(counts, axis=0) for counts in counted if counts]
    return np.concatenate(layers) if layers else np.zeros((0, 0), np.int64)


def _has_failed(returned: ExtensionReturned) -> bool:
    """Whether the rank failed: other ranks may wait for it in a collective, and would never reply."""
    return returned.failure is not None


def _has_raised(returned: ExtensionReturned) -> bool:
    """Whether the method was called and raised."""
    return returned.failure is not None and not returned.failure.is_user_error
