"""`rewind` drops the steps in flight as if they had never been planned; idle steps."""

from __future__ import annotations

import pytest
from output_chunks import addressed_chunks
from scheduler_fakes import ALICE, Engine, request

from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import StepResult
from eagleray.scheduler.scheduler import Scheduler


def check(engine, *request_ids):
    engine.run()
    for request_id in request_ids:
        engine.check_as_undisturbed((ALICE, request_id))
    engine.check_all_free()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rewind_running_requests_continue_from_applied_steps(depth):
    engine = Engine(depth=depth, max_num_batched_tokens=6)
    engine.add(request("a", range(9), max_tokens=8), request("b", [5, 6], max_tokens=8, routed_experts_from=0))
    for _ in range(3):
        engine.step()
    tokens = engine.tokens("a")
    while len(engine.in_flight) < depth and engine.plan() is not None:
        pass
    engine.rewind()
    plan = engine.plan()
    assert plan.freed_rows == list(range(4))
    starts = {start.request_id: start for start in plan.new_rows}
    assert starts["a"].token_ids == [*range(9), *tokens]
    assert starts["a"].num_computed_tokens == len(starts["a"].token_ids) - 1
    check(engine, "a", "b")


def test_rewind_partial_prompt_continues_from_applied_chunk():
    engine = Engine(depth=2, max_num_batched_tokens=4)
    engine.add(request("a", range(11)))
    engine.plan()
    engine.plan()
    engine.apply()
    engine.rewind()
    plan = engine.plan()
    assert [start.num_computed_tokens for start in plan.new_rows] == [4]
    check(engine, "a")
    assert engine.scheduler.stats().num_preemptions == 0


def test_rewind_blocks_of_dropped_steps_are_not_cached():
    engine = Engine(depth=2, block_size=4)
    engine.add(request("a", range(10)))
    engine.plan()
    engine.add(request("b", range(10)))
    assert engine.plan().num_tokens == [1, 2], "it reads what the step before computes"
    engine.rewind()
    plan = engine.plan()
    assert [start.num_computed_tokens for start in plan.new_rows] == [0, 8]
    assert plan.num_tokens == [10, 2]
    check(engine, "a", "b")


def test_rewind_blocks_of_ended_runs_are_released():
    engine = Engine(depth=2)
    engine.add(request("a", range(10)))
    engine.plan()
    engine.receive(engine.scheduler.abort(ALICE, ["a"]))
    assert engine.scheduler.stats().num_free_kv_blocks < 32
    engine.rewind()
    engine.check_all_free()
    assert not engine.scheduler.has_work


def test_rewind_next_plan_starts_all_rows_anew():
    engine = Engine(depth=2)
    engine.add(request("a", range(10), max_tokens=9), request("b", [1, 2, 3], max_tokens=9))
    engine.step()
    engine.rewind()
    engine.rewind()
    engine.idle()
    engine.receive(engine.scheduler.abort(ALICE, ["a"]))
    engine.add(request("c", [7]))
    plan = engine.plan()
    assert plan.freed_rows == list(range(4)) and {start.request_id for start in plan.new_rows} == {"b", "c"}
    check(engine, "b", "c")


def test_idle_plan_counts_as_a_step_in_flight():
    engine = Engine(depth=2)
    assert engine.plan() is None
    engine.idle()
    assert engine.scheduler.has_work
    engine.add(request("a", range(5)))
    assert engine.plan().step == 1
    assert engine.apply() == []
    check(engine, "a")


def test_rewind_run_preempted_by_next_plan_is_not_started_anew():
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
            assert [start.request_id for start in plan.new_rows] == ["a"]
        check(engine, "a", "b")
    assert num_seen == 1


def test_rewind_pooled_prompts_start_again():
    """Workers may have lost what they kept of the hidden states of an applied chunk."""
    scheduler = Scheduler(
        max_num_seqs=2,
        max_num_batched_tokens=4,
        max_model_len=16,
        block_size=4,
        num_blocks=8,
        enable_prefix_caching=False,
        policy="fcfs",
        pools=True,
    )
    stopping = Stopping(max_tokens=1)
    scheduler.add(
        Generate(
            request_id="a",
            client=ALICE,
            prompt_token_ids=list(range(10)),
            sampling=Sampling(seed=0),
            stopping=stopping,
            pools=True,
        )
    )
    plans = [scheduler.plan(), scheduler.plan()]
    assert [plan.num_tokens for plan in plans] == [[4], [4]]
    assert addressed_chunks(scheduler.apply(StepResult(step=0, rows=[], token_ids=[]))) == []
    scheduler.rewind()
    plan = scheduler.plan()
    assert [row.num_computed_tokens for row in plan.new_rows] == [0]
    assert plan.num_tokens == [4]
