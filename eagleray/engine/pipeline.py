"""The steps in flight: sent to the workers, their results not applied yet."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from eagleray.executor.executor import Executor, PendingStep
from eagleray.messages.steps import StepPlan, StepResult

LIMIT_TOKENS = 512
"""A step may take the watchdog's timeout, and as much again for every so many tokens: a long prompt is no hang."""


class AwaitedStep(NamedTuple):
    """A step that the engine waits for, and the seconds that it may take."""

    plan: StepPlan
    seconds: float


class Pipeline:
    """Up to `depth` steps: one for each pipeline stage, and one more if the next step is sent while one runs.

    `least_tokens`: every step may take as long as one of so many tokens. Where engines step together, the others may
    have as many in theirs.
    """

    def __init__(self, executor: Executor, *, depth: int, watchdog_timeout: float, least_tokens: int = 0) -> None:
        self._executor = executor
        self._depth = depth
        self._watchdog_timeout = watchdog_timeout
        self._least_tokens = least_tokens
        self._steps: deque[tuple[AwaitedStep, PendingStep]] = deque()
        self.awaited: AwaitedStep | None = None
        """The step that the engine's thread waits for right now: for the watchdog, which looks from another one."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        return len(self._steps) < self._depth

    @property
    def seconds(self) -> float:
        """What all steps in flight may take together, and something else after them."""
        return self._watchdog_timeout + sum(step.seconds for step, _ in self._steps)

    def send(self, plan: StepPlan) -> None:
        """With a worker that is an object of this process, the step is computed here."""
        self.awaited = step = AwaitedStep(plan, self._seconds(plan))
        try:
            self._steps.append((step, self._executor.step(plan, seconds=step.seconds)))
        finally:
            self.awaited = None

    def oldest(self) -> StepResult:
        """Wait for the result of the step that was sent first. Raises as `PendingStep.result` does."""
        self.awaited, pending = self._steps.popleft()
        try:
            return pending.result()
        finally:
            self.awaited = None

    def drop(self) -> None:
        """Wait for none of them any more."""
        self._steps.clear()

    def _seconds(self, plan: StepPlan) -> float:
        num_tokens = max(plan.total_num_tokens, self._least_tokens)
        return self._watchdog_timeout * (1 + num_tokens // LIMIT_TOKENS)
