"""What a step computes: budget, rows, chunks, blocks, preemption, and several steps in flight."""

from __future__ import annotations

import pytest
from scheduler_fakes import ALICE, Engine, request, undisturbed

from eagleray.messages.outputs import FinishReason


def step_of(plan):
    """Tokens of a plan by row."""
    return dict(zip(plan.rows, plan.num_tokens, strict=True))


def check_all_as_undisturbed(engine):
    for key in engine.messages:
        engine.check_as_undisturbed(key)
    engine.check_all_free()


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_samples():
    engine = Engine(max_num_batched_tokens=4)
    engine.add(request("r", range(10), max_tokens=2))
    assert [len(engine.step()) for _ in range(4)] == [0, 0, 1, 1]
    assert [step_of(plan) for plan in engine.plans] == [{0: 4}, {0: 4}, {0: 2}, {0: 1}]


def test_running_requests_go_before_the_prompts_of_others():
    engine = Engine(max_num_batched_tokens=4)
    engine.add(request("short", [1], max_tokens=9))
    engine.step()
    engine.add(request("long", range(20), max_tokens=2))
    for _ in range(4):
        assert len(engine.step()) == 1
        assert step_of(engine.plans[-1]) == {0: 1, 1: 3}
        assert engine.chunks[ALICE, "short"]


def test_a_step_is_filled_with_what_waits():
    engine = Engine(max_num_batched_tokens=10, enable_prefix_caching=False)
    engine.add(*(request(str(index), range(4)) for index in range(4)))
    assert step_of(engine.plan()) == {0: 4, 1: 4, 2: 2}


def test_rows_limit_how_many_run_and_are_used_again():
    engine = Engine(max_num_seqs=2)
    engine.add(request("a", [1], max_tokens=1), request("b", [2], max_tokens=3), request("c", [3], max_tokens=1))
    engine.step()
    assert engine.scheduler.stats().num_running == 1
    plan = engine.plan()
    assert plan.ends == [0] and [start.row for start in plan.starts] == [0] and step_of(plan) == {1: 1, 0: 1}


def test_a_request_starts_with_all_that_a_worker_must_know():
    engine = Engine(block_size=4)
    message = request("r", range(6), logprobs=2)
    engine.add(message)
    (start,) = engine.plan().starts
    assert (start.request_id, start.token_ids, start.num_prompt_tokens) == ("r", [0, 1, 2, 3, 4, 5], 6)
    assert (start.num_computed_tokens, len(start.block_ids), start.sampling) == (0, 2, message.sampling)


def test_blocks_are_added_when_a_row_outgrows_its_own():
    engine = Engine(block_size=4)
    engine.add(request("r", range(3), max_tokens=7))
    engine.run()
    assert [len(plan.grown) for plan in engine.plans] == [0, 0, 1, 0, 0, 0, 1]
    assert all(len(block_ids) == 1 for plan in engine.plans for _, block_ids in plan.grown)


def test_a_plan_is_the_callers_own():
    """The worker may be an object in this process: what it holds must not change under it."""
    engine = Engine(block_size=2)
    engine.add(request("r", range(3), max_tokens=8))
    plan = engine.plan()
    start = plan.starts[0]
    engine.apply()
    engine.run()
    assert start.token_ids == [0, 1, 2] and len(start.block_ids) == 2


def test_the_newest_is_preempted_and_comes_back_with_its_tokens():
    engine = Engine(block_size=2, num_blocks=6, max_model_len=12, enable_prefix_caching=False)
    engine.add(request("old", range(4), max_tokens=8), request("new", range(4), max_tokens=8))
    while engine.scheduler.stats().num_preemptions == 0:
        engine.step()
    preempted_in = engine.plans[-1]
    assert (preempted_in.ends, preempted_in.starts, preempted_in.rows) == ([1], [], [0])
    so_far = engine.tokens("new")
    assert 0 < len(so_far) < 8
    engine.run()
    again = next(start for plan in engine.plans[len(so_far) :] for start in plan.starts if start.request_id == "new")
    assert again.token_ids == [0, 1, 2, 3, *so_far]
    assert (again.num_prompt_tokens, again.num_computed_tokens) == (4, 0)
    check_all_as_undisturbed(engine)


def test_a_preempted_request_runs_before_those_that_never_ran():
    engine = Engine(block_size=2, num_blocks=6, max_model_len=12, enable_prefix_caching=False)
    engine.add(*(request(name, range(4), max_tokens=8) for name in ("a", "b", "c", "d")))
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    starts = [start.request_id for plan in engine.plans for start in plan.starts]
    assert [name for index, name in enumerate(starts) if name not in starts[:index]] == ["a", "b", "c", "d"]
    for earlier, later in zip("abc", "bcd", strict=True):
        last_start = len(starts) - 1 - starts[::-1].index(earlier)
        assert last_start < len(starts) - 1 - starts[::-1].index(later)
    check_all_as_undisturbed(engine)


def test_low_priority_waits_and_is_preempted_first_even_if_older():
    engine = Engine(block_size=2, num_blocks=6, max_model_len=12, enable_prefix_caching=False, policy="priority")
    engine.add(request("idle", range(4), max_tokens=8, priority=5))
    engine.step()
    engine.add(request("urgent", range(4), max_tokens=8, priority=-5), request("normal", range(4), max_tokens=2))
    while engine.scheduler.has_work:
        for chunk in engine.step():
            if chunk.finish_reason is not None:
                assert engine.is_ended((ALICE, "urgent")) or chunk.request_id == "urgent"
    assert engine.scheduler.stats().num_preemptions > 0
    starts = [start.request_id for plan in engine.plans for start in plan.starts]
    assert starts[:2] == ["idle", "urgent"] and starts[-1] == "idle"
    check_all_as_undisturbed(engine)


def test_nobody_starts_in_a_step_that_preempts():
    engine = Engine(
        max_num_seqs=2, block_size=2, num_blocks=6, max_model_len=12, enable_prefix_caching=False, policy="priority"
    )
    engine.add(*(request(name, range(4), max_tokens=8, priority=priority) for name, priority in [("a", 0), ("c", 2)]))
    engine.step()
    engine.add(request("b", [1], priority=1))
    while engine.scheduler.stats().num_preemptions == 0:
        engine.step()
    assert engine.plans[-1].ends == [1] and engine.plans[-1].starts == []
    engine.step()
    assert [start.request_id for start in engine.plans[-1].starts] == ["b"]
    engine.run()
    check_all_as_undisturbed(engine)


def test_priorities_mean_nothing_under_first_come_first_served():
    engine = Engine(max_num_seqs=1, policy="fcfs")
    engine.add(request("a", [1], priority=9), request("b", [1], priority=0))
    engine.run()
    assert [start.request_id for plan in engine.plans for start in plan.starts] == ["a", "b"]


def test_priority_decides_who_starts_first():
    engine = Engine(max_num_seqs=1, policy="priority")
    engine.add(*(request(name, [1], priority=p) for name, p in [("c", 2), ("a", 0), ("d", 2), ("b", 1)]))
    engine.run()
    assert [start.request_id for plan in engine.plans for start in plan.starts] == ["a", "b", "c", "d"]


def test_a_prompt_that_does_not_fit_as_a_whole_waits():
    """Its first chunk would fit, but then it would be thrown out for the next one."""
    engine = Engine(block_size=2, num_blocks=8, max_model_len=16, max_num_batched_tokens=4, enable_prefix_caching=False)
    engine.add(request("runs", range(4), max_tokens=4), request("large", range(14), max_tokens=2))
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
    check_all_as_undisturbed(engine)


def test_two_plans_before_the_first_result():
    engine = Engine(block_size=4)
    engine.add(request("r", range(4), max_tokens=3))
    first, second, third = engine.plan(), engine.plan(), engine.plan()
    assert [step_of(plan) for plan in (first, second, third)] == [{0: 4}, {0: 1}, {0: 1}]
    assert second.starts == [] and len(second.grown) == 1
    assert engine.plan() is None, "the fourth token would be one too many"
    assert [chunk.token_ids for _ in range(3) for chunk in engine.apply()] == [[t] for t in engine.tokens("r")]
    check_all_as_undisturbed(engine)


def test_a_result_after_the_end_is_nobodys():
    """Step 1 was planned before it was known that step 0 ends the request; its row runs someone else by then."""
    tokens, _, _ = undisturbed(request("r", [1, 2]), max_model_len=32)
    engine = Engine(max_num_seqs=1)
    engine.add(request("ends", [1, 2], eos=(tokens[0],)), request("next", [3], max_tokens=2))
    engine.plan()
    engine.plan()
    assert [chunk.finish_reason for chunk in engine.apply()] == [FinishReason.STOP]
    plan = engine.plan()
    assert plan.ends == [0] and plan.starts[0].request_id == "next"
    assert engine.apply() == []
    engine.run()
    check_all_as_undisturbed(engine)


def test_blocks_of_a_step_in_flight_are_not_given_away():
    engine = Engine(block_size=4, num_blocks=8, enable_prefix_caching=False)
    engine.add(request("r", range(8), max_tokens=8))
    engine.plan()
    engine.plan()
    engine.take(engine.scheduler.abort(ALICE, ["r"]))
    engine.add(request("all", range(31), max_tokens=1))
    assert engine.plan() is None, "three blocks are still read and written"
    engine.apply()
    assert engine.scheduler.stats().num_free_kv_blocks == 5
    engine.apply()
    assert engine.scheduler.stats().num_free_kv_blocks == 8
    engine.run()
    check_all_as_undisturbed(engine)


def test_one_preemption_is_enough_while_its_blocks_are_on_their_way():
    engine = Engine(depth=2, block_size=2, num_blocks=6, max_model_len=8, enable_prefix_caching=False)
    engine.add(*(request(name, range(3), max_tokens=5) for name in ("a", "b", "c")))
    while engine.scheduler.stats().num_preemptions == 0:
        engine.step()
    engine.plan()
    assert engine.scheduler.stats().num_preemptions == 1
    engine.run()
    check_all_as_undisturbed(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_tiny_cache_preempts_again_and_again_and_changes_nothing(depth, caching):
    engine = Engine(depth=depth, block_size=1, num_blocks=24, max_model_len=24, enable_prefix_caching=caching)
    engine.add(*(request(str(index), [index] * 3, max_tokens=20) for index in range(6)))
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 5
    check_all_as_undisturbed(engine)


@pytest.mark.parametrize("depth", [2, 3])
def test_running_requests_take_turns_in_a_pipeline(depth):
    """Two stages: every step computes one half of the requests; none waits for a token of the step before it."""
    engine = Engine(depth=depth, num_stages=2, max_num_seqs=8, num_blocks=64)
    engine.add(*(request(str(index), [index] * 2, max_tokens=20) for index in range(8)))
    for step in range(24):
        while len(engine.in_flight) < depth and (plan := engine.plan()) is not None:
            if step > 8:
                newest = engine.plans[-2]
                assert len(plan.rows) == 4
                assert not set(newest.rows) & set(plan.rows)
        engine.apply()
    engine.run()
    check_all_as_undisturbed(engine)


def test_one_request_alone_goes_through_a_pipeline():
    engine = Engine(depth=3, num_stages=2)
    engine.add(request("a", [1, 2, 3], max_tokens=6))
    assert engine.plan() is not None
    assert engine.plan() is None, "its token is not known to the first stage"
    engine.run()
    check_all_as_undisturbed(engine)
