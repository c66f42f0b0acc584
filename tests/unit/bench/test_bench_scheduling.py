"""The benchmark of the scheduler measures the steps that its docstring describes."""

from __future__ import annotations

import pytest

from eagleray.errors import UserError
from eagleray_bench.scheduling import CHUNK_TOKENS, KINDS, PROMPT_TOKENS, EndlessRequests, measure_scheduling


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


@pytest.mark.parametrize("kind", ["routed", "rollout"])
def test_endless_requests_routed_step_reports_experts_of_every_row(kind):
    for plan in plans(kind, 3, 20):
        assert plan.capture_rows == plan.rows and len(plan.rows) == 3


def test_endless_requests_drafted_steps_have_drafts_and_undrafted_ones_have_none():
    assert all(plan.drafts for plan in plans("drafted", 2, 60)[40:])
    assert not any(plan.drafts for plan in plans("undrafted", 2, 60))


def test_measure_scheduling_gives_figures_of_each_kind_and_number():
    found = list(measure_scheduling(num_requests=[1, 3], steps=20))
    assert [(figures.kind, figures.num_requests) for figures in found] == [
        (kind, count) for kind in KINDS for count in (1, 3)
    ]
    for figures in found:
        assert figures.both_us.count == 20
        assert figures.both_us.mean == pytest.approx(figures.plan_us.mean + figures.apply_us.mean)
        times = figures.plan_us, figures.apply_us, figures.send_us, figures.receive_us
        assert all(one.lowest > 0 for one in times)
        if figures.kind == "drafted":
            assert figures.num_tokens > 3 * figures.num_requests
        elif figures.kind != "mixed":
            assert figures.num_tokens == figures.num_requests


def test_measure_scheduling_nothing_to_measure_raises():
    for options in ({"num_requests": [0], "steps": 1}, {"num_requests": [1], "steps": 0}):
        with pytest.raises(UserError, match="--steps and --requests must be at least 1"):
            list(measure_scheduling(**options))
