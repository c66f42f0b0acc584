"""Content of a step: budget, rows, chunks, blocks, preemption, and several steps in flight."""

from __future__ import annotations

import pytest
from scheduler_fakes import ALICE, BOB, Engine, request, undisturbed

from eagleray.identity import EngineId
from eagleray.messages.outputs import Chunk, Chunks, FinishReason, TokenColumns, TokenLogprobs
from eagleray.scheduler.step_outputs import AddressedChunk, StepOutputs


def step_of(plan):
    """Tokens of a plan by row."""
    return dict(zip(plan.rows, plan.num_tokens, strict=True))


def check_all_as_undisturbed(engine):
    for key in engine.messages:
        engine.check_as_undisturbed(key)
    engine.check_all_free()


def test_plan_long_prompt_is_chunked_and_last_chunk_samples():
    engine = Engine(max_num_batched_tokens=4)
    engine.add(request("r", range(10), max_tokens=2))
    assert [len(engine.step()) for _ in range(4)] == [0, 0, 1, 1]
    assert [step_of(plan) for plan in engine.plans] == [{0: 4}, {0: 4}, {0: 2}, {0: 1}]


def test_plan_running_requests_come_before_new_prompts():
    engine = Engine(max_num_batched_tokens=4)
    engine.add(request("short", [1], max_tokens=9))
    engine.step()
    engine.add(request("long", range(20), max_tokens=2))
    for _ in range(4):
        assert len(engine.step()) == 1
        assert step_of(engine.plans[-1]) == {0: 1, 1: 3}
        assert engine.chunks[ALICE, "short"]


def test_plan_budget_left_is_filled_with_waiting_requests():
    engine = Engine(max_num_batched_tokens=10, enable_prefix_caching=False)
    engine.add(*(request(str(index), range(4)) for index in range(4)))
    assert step_of(engine.plan()) == {0: 4, 1: 4, 2: 2}


def test_plan_all_rows_taken_requests_wait_for_a_free_row():
    engine = Engine(max_num_seqs=2)
    engine.add(request("a", [1], max_tokens=1), request("b", [2], max_tokens=3), request("c", [3], max_tokens=1))
    engine.step()
    assert engine.scheduler.stats().num_running == 1
    plan = engine.plan()
    assert plan.freed_rows == [0] and [start.row for start in plan.new_rows] == [0] and step_of(plan) == {1: 1, 0: 1}


def test_plan_new_row_has_the_request_state():
    engine = Engine(block_size=4)
    message = request("r", range(6), logprobs=2)
    engine.add(message)
    (start,) = engine.plan().new_rows
    assert (start.request_id, start.token_ids, start.num_prompt_tokens) == ("r", [0, 1, 2, 3, 4, 5], 6)
    assert (start.num_computed_tokens, len(start.block_ids), start.sampling) == (0, 2, message.sampling)


def test_plan_row_outgrows_blocks_new_blocks_are_appended():
    engine = Engine(block_size=4)
    engine.add(request("r", range(3), max_tokens=7))
    engine.run()
    assert [len(plan.new_blocks) for plan in engine.plans] == [0, 0, 1, 0, 0, 0, 1]
    assert all(len(block_ids) == 1 for plan in engine.plans for _, block_ids in plan.new_blocks)


def test_plan_lists_are_copies():
    """A worker may be an object of this process: its lists must not change when the scheduler goes on."""
    engine = Engine(block_size=2)
    engine.add(request("r", range(3), max_tokens=8))
    plan = engine.plan()
    start = plan.new_rows[0]
    engine.apply()
    engine.run()
    assert start.token_ids == [0, 1, 2] and len(start.block_ids) == 2


def test_preemption_newest_request_returns_with_its_tokens():
    engine = Engine(block_size=2, num_blocks=6, max_model_len=12, enable_prefix_caching=False)
    engine.add(request("old", range(4), max_tokens=8), request("new", range(4), max_tokens=8))
    while engine.scheduler.stats().num_preemptions == 0:
        engine.step()
    preempted_in = engine.plans[-1]
    assert (preempted_in.freed_rows, preempted_in.new_rows, preempted_in.rows) == ([1], [], [0])
    so_far = engine.tokens("new")
    assert 0 < len(so_far) < 8
    engine.run()
    again = next(start for plan in engine.plans[len(so_far) :] for start in plan.new_rows if start.request_id == "new")
    assert again.token_ids == [0, 1, 2, 3, *so_far]
    assert (again.num_prompt_tokens, again.num_computed_tokens) == (4, 0)
    check_all_as_undisturbed(engine)


def test_preemption_request_is_admitted_before_newer_ones():
    engine = Engine(block_size=2, num_blocks=6, max_model_len=12, enable_prefix_caching=False)
    engine.add(*(request(name, range(4), max_tokens=8) for name in ("a", "b", "c", "d")))
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    starts = [start.request_id for plan in engine.plans for start in plan.new_rows]
    assert [name for index, name in enumerate(starts) if name not in starts[:index]] == ["a", "b", "c", "d"]
    for earlier, later in zip("abc", "bcd", strict=True):
        last_start = len(starts) - 1 - starts[::-1].index(earlier)
        assert last_start < len(starts) - 1 - starts[::-1].index(later)
    check_all_as_undisturbed(engine)


def test_priority_low_waits_and_is_preempted_first():
    engine = Engine(block_size=2, num_blocks=6, max_model_len=12, enable_prefix_caching=False, policy="priority")
    engine.add(request("idle", range(4), max_tokens=8, priority=5))
    engine.step()
    engine.add(request("urgent", range(4), max_tokens=8, priority=-5), request("normal", range(4), max_tokens=2))
    while engine.scheduler.has_work:
        for chunk in engine.step():
            if chunk.finish_reason is not None:
                assert engine.is_ended((ALICE, "urgent")) or chunk.request_id == "urgent"
    assert engine.scheduler.stats().num_preemptions > 0
    starts = [start.request_id for plan in engine.plans for start in plan.new_rows]
    assert starts[:2] == ["idle", "urgent"] and starts[-1] == "idle"
    check_all_as_undisturbed(engine)


def test_plan_with_preemption_admits_nothing():
    engine = Engine(
        max_num_seqs=2, block_size=2, num_blocks=6, max_model_len=12, enable_prefix_caching=False, policy="priority"
    )
    engine.add(*(request(name, range(4), max_tokens=8, priority=priority) for name, priority in [("a", 0), ("c", 2)]))
    engine.step()
    engine.add(request("b", [1], priority=1))
    while engine.scheduler.stats().num_preemptions == 0:
        engine.step()
    assert engine.plans[-1].freed_rows == [1] and engine.plans[-1].new_rows == []
    engine.step()
    assert [start.request_id for start in engine.plans[-1].new_rows] == ["b"]
    engine.run()
    check_all_as_undisturbed(engine)


def test_priority_policy_fcfs_ignores_it():
    engine = Engine(max_num_seqs=1, policy="fcfs")
    engine.add(request("a", [1], priority=9), request("b", [1], priority=0))
    engine.run()
    assert [start.request_id for plan in engine.plans for start in plan.new_rows] == ["a", "b"]


def test_priority_lower_number_is_admitted_first():
    engine = Engine(max_num_seqs=1, policy="priority")
    engine.add(*(request(name, [1], priority=p) for name, p in [("c", 2), ("a", 0), ("d", 2), ("b", 1)]))
    engine.run()
    assert [start.request_id for plan in engine.plans for start in plan.new_rows] == ["a", "b", "c", "d"]


def test_plan_prompt_without_room_for_all_of_it_waits():
    """The first chunk would fit, but the request would be preempted for its second."""
    engine = Engine(block_size=2, num_blocks=8, max_model_len=16, max_num_batched_tokens=4, enable_prefix_caching=False)
    engine.add(request("runs", range(4), max_tokens=4), request("large", range(14), max_tokens=2))
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
    check_all_as_undisturbed(engine)


def test_plan_twice_before_the_first_result_works():
    engine = Engine(block_size=4)
    engine.add(request("r", range(4), max_tokens=3))
    first, second, third = engine.plan(), engine.plan(), engine.plan()
    assert [step_of(plan) for plan in (first, second, third)] == [{0: 4}, {0: 1}, {0: 1}]
    assert second.new_rows == [] and len(second.new_blocks) == 1
    assert engine.plan() is None, "the fourth token would be one too many"
    assert [chunk.token_ids for _ in range(3) for chunk in engine.apply()] == [[t] for t in engine.tokens("r")]
    check_all_as_undisturbed(engine)


def test_apply_result_of_ended_run_is_dropped():
    """Step 1 was planned before it was known that step 0 ends the request; its row holds another request by then."""
    tokens, _, _ = undisturbed(request("r", [1, 2]), max_model_len=32)
    engine = Engine(max_num_seqs=1)
    engine.add(request("ends", [1, 2], eos=(tokens[0],)), request("next", [3], max_tokens=2))
    engine.plan()
    engine.plan()
    assert [chunk.finish_reason for chunk in engine.apply()] == [FinishReason.STOP]
    plan = engine.plan()
    assert plan.freed_rows == [0] and plan.new_rows[0].request_id == "next"
    assert engine.apply() == []
    engine.run()
    check_all_as_undisturbed(engine)


def test_plan_blocks_of_a_step_in_flight_are_not_reused():
    engine = Engine(block_size=4, num_blocks=8, enable_prefix_caching=False)
    engine.add(request("r", range(8), max_tokens=8))
    engine.plan()
    engine.plan()
    engine.receive(engine.scheduler.abort(ALICE, ["r"]))
    engine.add(request("all", range(31), max_tokens=1))
    assert engine.plan() is None, "three blocks are still read and written"
    engine.apply()
    assert engine.scheduler.stats().num_free_kv_blocks == 5
    engine.apply()
    assert engine.scheduler.stats().num_free_kv_blocks == 8
    engine.run()
    check_all_as_undisturbed(engine)


def test_preemption_waits_for_blocks_of_steps_in_flight():
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
def test_preemption_repeated_in_tiny_cache_tokens_are_unchanged(depth, caching):
    engine = Engine(depth=depth, block_size=1, num_blocks=24, max_model_len=24, enable_prefix_caching=caching)
    engine.add(*(request(str(index), [index] * 3, max_tokens=20) for index in range(6)))
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 5
    check_all_as_undisturbed(engine)


@pytest.mark.parametrize("depth", [2, 3])
def test_plan_pipeline_stages_running_requests_take_turns(depth):
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


def test_plan_pipeline_stages_single_request_finishes():
    engine = Engine(depth=3, num_stages=2)
    engine.add(request("a", [1, 2, 3], max_tokens=6))
    assert engine.plan() is not None
    assert engine.plan() is None, "its token is not known to the first stage"
    engine.run()
    check_all_as_undisturbed(engine)


def test_apply_first_and_last_token_come_in_chunks_and_others_alone():
    engine = Engine()
    engine.add(request("a", [1, 2], max_tokens=20), request("b", [3], client=BOB, max_tokens=20))
    alone = []
    for _ in range(20):
        engine.plan()
        outputs = engine.scheduler.apply(engine.in_flight.popleft())
        to_clients = outputs.by_client
        alone.append({client: list(one.tokens) for client, one in to_clients.items() if one.tokens})
        assert [len(one.chunks) + len(one.tokens) for one in to_clients.values()] == [1, 1], "each request once"
    assert alone[0] == alone[-1] == {}
    assert alone.count({ALICE: ["a"], BOB: ["b"]}) > 10


def test_apply_logprobs_come_with_every_token():
    engine = Engine()
    engine.add(request("a", [1, 2], max_tokens=20, logprobs=0), request("b", [3], max_tokens=20))
    engine.run()
    check_all_as_undisturbed(engine)
    assert [len(chunk.logprobs) for chunk in engine.chunks[ALICE, "a"]] == [1] * 20
    assert not any(chunk.logprobs for chunk in engine.chunks[ALICE, "b"])


def test_messages_of_a_step_are_one_for_each_client():
    chunk = Chunk(request_id="c")
    outputs = StepOutputs.of([AddressedChunk(BOB, chunk), AddressedChunk(ALICE, chunk)])
    outputs.by_client[ALICE].tokens["a"] = 7
    engine = EngineId("test", 0)
    assert outputs.messages(engine) == {
        ALICE: Chunks(engine, [chunk], {"a": 7}),
        BOB: Chunks(engine, [chunk]),
    }


def test_messages_with_details_leave_out_columns_without_any():
    logprobs, engine = TokenLogprobs([7], [-1.0], 1), EngineId("test", 0)
    outputs = StepOutputs()
    outputs.by_client[ALICE].detailed += [("a", 7, logprobs, b""), ("b", 8, None, b"")]
    outputs.by_client[BOB].detailed += [("a", 7, None, b"xy"), ("b", 8, None, b"")]
    assert outputs.messages(engine) == {
        ALICE: Chunks(engine, [], columns=TokenColumns(["a", "b"], [7, 8], [logprobs, None])),
        BOB: Chunks(engine, [], columns=TokenColumns(["a", "b"], [7, 8], routed_experts=[b"xy", b""])),
    }
