"""Steps in flight: sent to the workers, results not applied yet."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from eagleray.executor.executor import Executor, PendingStep
from eagleray.messages.steps import StepPlan, StepResult

TOKENS_PER_TIMEOUT = 512
"""A step may take the watchdog's timeout, and as long again for each multiple of this number of tokens, so that a long
prompt is not taken for a hang."""


class AwaitedStep(NamedTuple):
    """A step that the engine waits for, and its time limit in seconds."""

    plan: StepPlan
    seconds: float


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
        """Stop waiting for the steps in flight."""
        self._steps.clear()

    def _seconds(self, plan: StepPlan) -> float:
        num_tokens = max(plan.total_num_tokens, self._least_tokens)
        return self._watchdog_timeout * (1 + num_tokens // TOKENS_PER_TIMEOUT)
