"""The benchmark of the scheduler measures the steps that its docstring describes."""

from __future__ import annotations

import pytest

from eagleray.errors import UserError
from eagleray_bench.scheduling import CHUNK_TOKENS, PROMPT_TOKENS, EndlessRequests, measure_scheduling


def plans(kind: str, num_requests: int, num_steps: int) -> list:
    """Return the plans of `num_steps` steps after the start."""
    run = EndlessRequests(kind, num_requests, num_steps=num_steps)
    kept = []
    execute = run.model.execute
    run.model.execute = lambda plan: kept.append(plan) or execute(plan)
    for _ in range(num_steps):
        run.step()
    return kept


@pytest.mark.parametrize("num_requests", [1, 40])
def test_endless_requests_decode_step_computes_a_token_of_every_request(num_requests):
    for plan in plans("decode", num_requests, 30):
        assert plan.num_tokens == [1] * num_requests
        assert not plan.new_rows and not plan.freed_rows


@pytest.mark.parametrize("num_requests", [1, 300])
def test_endless_requests_mixed_step_also_computes_a_prompt_chunk(num_requests):
    found = plans("mixed", num_requests, 30)
    assert sum(len(plan.new_rows) for plan in found) > 1, "one prompt after the other"
    for plan in found:
        assert sorted(plan.num_tokens)[:num_requests] == [1] * num_requests
        assert len(plan.num_tokens) == num_requests + 1
    assert max(max(plan.num_tokens) for plan in found) >= CHUNK_TOKENS > PROMPT_TOKENS


def test_measure_scheduling_gives_figures_of_each_kind_and_number():
    found = list(measure_scheduling(num_requests=[1, 3], steps=20))
    assert [(figures.kind, figures.num_requests) for figures in found] == [
        ("decode", 1),
        ("decode", 3),
        ("mixed", 1),
        ("mixed", 3),
    ]
    for figures in found:
        assert figures.both_us.count == 20
        assert figures.both_us.mean == pytest.approx(figures.plan_us.mean + figures.apply_us.mean)
        assert figures.plan_us.lowest > 0 and figures.apply_us.lowest > 0


def test_measure_scheduling_nothing_to_measure_raises():
    for options in ({"num_requests": [0], "steps": 1}, {"num_requests": [1], "steps": 0}):
        with pytest.raises(UserError, match="--steps and --requests must be at least 1"):
            list(measure_scheduling(**options))
