"""Steps in flight are dropped as if they had never been planned; and steps in which an engine has nothing to do."""

from __future__ import annotations

import pytest
from scheduler_fakes import ALICE, Engine, request


def check(engine, *request_ids):
    engine.run()
    for request_id in request_ids:
        engine.check_as_undisturbed((ALICE, request_id))
    engine.check_all_free()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_running_requests_go_on_from_what_was_applied(depth):
    engine = Engine(depth=depth, max_num_batched_tokens=6)
    engine.add(request("a", range(9), max_tokens=8), request("b", [5, 6], max_tokens=8, routed_experts_from=0))
    for _ in range(3):
        engine.step()
    tokens = engine.tokens("a")
    while len(engine.in_flight) < depth and engine.plan() is not None:
        pass
    engine.rewind()
    plan = engine.plan()
    assert plan.ends == list(range(4))
    starts = {start.request_id: start for start in plan.starts}
    assert starts["a"].token_ids == [*range(9), *tokens]
    assert starts["a"].num_computed_tokens == len(starts["a"].token_ids) - 1
    check(engine, "a", "b")


def test_a_prompt_goes_on_where_it_was_applied():
    engine = Engine(depth=2, max_num_batched_tokens=4)
    engine.add(request("a", range(11)))
    engine.plan()
    engine.plan()
    engine.apply()
    engine.rewind()
    plan = engine.plan()
    assert [start.num_computed_tokens for start in plan.starts] == [4]
    check(engine, "a")
    assert engine.scheduler.stats().num_preemptions == 0


def test_what_dropped_steps_computed_is_not_found():
    engine = Engine(depth=2, block_size=4)
    engine.add(request("a", range(10)))
    engine.plan()
    engine.add(request("b", range(10)))
    assert engine.plan().num_tokens == [1, 2], "it reads what the step before computes"
    engine.rewind()
    plan = engine.plan()
    assert [start.num_computed_tokens for start in plan.starts] == [0, 8]
    assert plan.num_tokens == [10, 2]
    check(engine, "a", "b")


def test_blocks_of_runs_that_were_over_are_free():
    engine = Engine(depth=2)
    engine.add(request("a", range(10)))
    engine.plan()
    engine.take(engine.scheduler.abort(ALICE, ["a"]))
    assert engine.scheduler.stats().num_free_kv_blocks < 32
    engine.rewind()
    engine.check_all_free()
    assert not engine.scheduler.has_work


def test_rows_are_started_anew_by_the_first_plan_that_there_is():
    engine = Engine(depth=2)
    engine.add(request("a", range(10), max_tokens=9), request("b", [1, 2, 3], max_tokens=9))
    engine.step()
    engine.rewind()
    engine.rewind()
    engine.idle()
    engine.take(engine.scheduler.abort(ALICE, ["a"]))
    engine.add(request("c", [7]))
    plan = engine.plan()
    assert plan.ends == list(range(4)) and {start.request_id for start in plan.starts} == {"b", "c"}
    check(engine, "b", "c")


def test_an_idle_step_is_a_step():
    engine = Engine(depth=2)
    assert engine.plan() is None
    engine.idle()
    assert engine.scheduler.has_work
    engine.add(request("a", range(5)))
    assert engine.plan().step == 1
    assert engine.apply() == []
    check(engine, "a")


def test_a_run_that_is_preempted_by_the_first_plan_is_not_started_anew():
    num_seen = 0
    for num_steps in range(12):
        engine = Engine(block_size=2, num_blocks=12, max_model_len=24)
        engine.add(*(request(name, [1, 2], max_tokens=20, salt=name) for name in "ab"))
        for _ in range(num_steps):
            engine.step()
        if engine.scheduler.stats().num_preemptions > 0:
            break
        engine.rewind()
        plan = engine.plan()
        if engine.scheduler.stats().num_preemptions > 0:
            num_seen += 1
            assert [start.request_id for start in plan.starts] == ["a"]
        check(engine, "a", "b")
    assert num_seen == 1
