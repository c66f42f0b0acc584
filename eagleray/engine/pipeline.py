"""The steps in flight: sent to the workers, their results not applied yet."""

from __future__ import annotations

from collections import deque

from eagleray.executor import Executor, PendingStep
from eagleray.messages.steps import StepPlan, StepResult

__all__ = ["Pipeline"]


class Pipeline:
    """Up to `depth` steps: one for each pipeline stage, and one more if the next step is sent while one runs."""

    def __init__(self, executor: Executor, *, depth: int) -> None:
        self._executor = executor
        self._depth = depth
        self._steps: deque[PendingStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        return len(self._steps) < self._depth

    def send(self, plan: StepPlan) -> None:
        self._steps.append(self._executor.step(plan))

    def oldest(self) -> StepResult:
        """Wait for the result of the step that was sent first. Raises as `PendingStep.result` does."""
        return self._steps.popleft().result()
