"""Steps that compute nothing, to measure what a step costs on its way (`eagleray bench rpc`)."""

from __future__ import annotations

from eagleray.messages.steps import StepPlan, StepResult


class NullRunner:
    """Answers token 0 for every row that could sample."""

    def __init__(self, *, is_sampler: bool) -> None:
        self._is_sampler = is_sampler
        self._num_uncomputed: dict[int, int] = {}

    def step(self, plan: StepPlan) -> StepResult | None:
        for start in plan.new_rows:
            self._num_uncomputed[start.row] = len(start.token_ids) - start.num_computed_tokens
        rows = []
        for row, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
            self._num_uncomputed[row] -= num_tokens
            if self._num_uncomputed[row] == 0:
                self._num_uncomputed[row] = 1
                rows.append(row)
        return StepResult(step=plan.step, rows=rows, token_ids=[0] * len(rows)) if self._is_sampler else None
