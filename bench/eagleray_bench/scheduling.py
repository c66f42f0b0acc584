"""Cost of a step in the scheduler, before and after the model, which is a mere table of rows here.

Two kinds of steps. `decode`: every running request computes one token. `mixed`: in addition a long prompt
takes the rest of the token budget, chunk by chunk; when it is computed, the next one follows.

Times are those of the thread on its core, since the scheduler waits for nothing and other processes may share the core.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from eagleray.errors import UserError
from eagleray.identity import ClientId
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import StepPlan, StepResult
from eagleray.scheduler.scheduler import Scheduler
from eagleray_bench.figures import Summary, summarize

KINDS: tuple[Literal["decode", "mixed"], ...] = ("decode", "mixed")

CLIENT = ClientId("bench", 0)
BLOCK_SIZE = 16
PROMPT_TOKENS = 32
LONG_PROMPT_TOKENS = 2048
MIN_BUDGET = 512
CHUNK_TOKENS = 256
"""Least part of the token budget that the running requests leave to a long prompt."""
WARM_UP = 50
TOKEN = 7


class SchedulingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of CPU time per step."""

    kind: str
    num_requests: int
    plan_us: Summary
    apply_us: Summary
    both_us: Summary


def measure_scheduling(
    *, num_requests: Sequence[int], steps: int, kinds: Sequence[str] = KINDS
) -> Iterator[SchedulingFigures]:
    """Measure each kind with each number of requests. Raises `UserError` for numbers below 1."""
    if steps < 1 or min(num_requests) < 1:
        raise UserError("--steps and --requests must be at least 1")
    for kind in kinds:
        for count in num_requests:
            yield _measure(kind, count, steps)


def _measure(kind: str, num_requests: int, steps: int) -> SchedulingFigures:
    run = EndlessRequests(kind, num_requests, num_steps=steps + WARM_UP)
    times = np.array([run.step() for _ in range(steps + WARM_UP)][WARM_UP:])  # [steps, 2]: plan, apply
    plan, apply, both = (summarize(values.tolist(), scale=1e6) for values in (*times.T, times.sum(axis=1)))
    assert plan is not None and apply is not None and both is not None
    return SchedulingFigures(kind=kind, num_requests=num_requests, plan_us=plan, apply_us=apply, both_us=both)


class EndlessRequests:
    """A scheduler with `num_requests` running requests that do not finish within `num_steps`."""

    def __init__(self, kind: str, num_requests: int, *, num_steps: int) -> None:
        self._is_mixed = kind == "mixed"
        budget = max(MIN_BUDGET, num_requests + CHUNK_TOKENS)
        start_steps = 2 + num_requests * PROMPT_TOKENS // (budget - num_requests)
        max_model_len = max(PROMPT_TOKENS + start_steps + num_steps, LONG_PROMPT_TOKENS) + 1
        self._num_tokens = max_model_len - PROMPT_TOKENS
        self._scheduler = Scheduler(
            max_num_seqs=num_requests + 1,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=(num_requests + 2) * -(-max_model_len // BLOCK_SIZE),
            enable_prefix_caching=True,
            policy="fcfs",
        )
        self.model = RowCounter()
        self._num_added = 0
        for _ in range(num_requests):
            self._add(PROMPT_TOKENS, self._num_tokens)
        while self._scheduler.stats().num_waiting:  # all requests run before the clock does
            self.step(start=True)

    def step(self, *, start: bool = False) -> tuple[float, float]:
        """Run a step and return the seconds of planning and of applying. `start`: add no long prompt yet."""
        if self._is_mixed and not start and not self.model.has_prompt:
            self._add(LONG_PROMPT_TOKENS, 1)
        began = time.thread_time()
        plan = self._scheduler.plan()
        planned = time.thread_time()
        assert plan is not None, "there is always a running request"
        result = self.model.execute(plan)
        resumed = time.thread_time()
        self._scheduler.apply(result)
        return planned - began, time.thread_time() - resumed

    def _add(self, num_tokens: int, max_tokens: int) -> None:
        """Add a request whose prompt differs from all others from its first token on, so that the cache has no hit."""
        self._num_added += 1
        self._scheduler.add(
            Generate(
                request_id=str(self._num_added),
                client=CLIENT,
                prompt_token_ids=[self._num_added] * num_tokens,
                sampling=Sampling(seed=0),
                stopping=Stopping(max_tokens=max_tokens),
            )
        )


class RowCounter:
    """The rows of a worker without a model: a row whose tokens are all computed samples one."""

    def __init__(self) -> None:
        self._uncomputed: dict[int, int] = {}
        self._prompts: set[int] = set()

    @property
    def has_prompt(self) -> bool:
        """Whether a row has not sampled yet."""
        return bool(self._prompts)

    def execute(self, plan: StepPlan) -> StepResult:
        for row in plan.freed_rows:
            del self._uncomputed[row]
        for start in plan.new_rows:
            self._uncomputed[start.row] = len(start.token_ids) - start.num_computed_tokens
            self._prompts.add(start.row)
        sampled = []
        for row, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
            self._uncomputed[row] -= num_tokens
            if self._uncomputed[row] == 0:
                self._uncomputed[row] = 1
                self._prompts.discard(row)
                sampled.append(row)
        return StepResult(step=plan.step, rows=sampled, token_ids=[TOKEN] * len(sampled))
