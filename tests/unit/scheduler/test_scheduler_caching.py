"""Hits in the prefix cache: which blocks are found, by which requests, and for how long."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_fakes import ALICE, Engine, request


def cached(engine, request_id):
    """Return the cached prompt tokens that the first chunk reports."""
    return engine.chunks[ALICE, request_id][0].num_cached_tokens


def run(engine, *messages):
    engine.add(*messages)
    engine.run()
    for message in messages:
        engine.check_as_undisturbed((message.client, message.request_id))
    engine.check_all_free()
    return [cached(engine, message.request_id) for message in messages]


def test_prefix_cache_full_blocks_are_found():
    engine = Engine(block_size=4)
    assert run(engine, request("first", range(10))) == [0]
    assert run(engine, request("same", range(10)), request("longer", range(14))) == [8, 8]
    assert run(engine, request("branch", [0, 1, 2, 3, 9, 9, 9, 9])) == [4]


def test_prefix_cache_whole_prompt_cached_computes_last_token():
    engine = Engine(block_size=4)
    assert run(engine, request("first", range(8))) == [0]
    assert run(engine, request("same", range(8))) == [4]


def test_prefix_cache_disabled_finds_nothing():
    engine = Engine(enable_prefix_caching=False)
    assert run(engine, request("first", range(10))) + run(engine, request("same", range(10))) == [0, 0]
    assert engine.scheduler.stats().num_prefix_queries == 0


def test_prefix_cache_request_that_skips_reading_fills_it_for_others():
    engine = Engine(block_size=4)
    skipping = [msgspec.structs.replace(request(name, range(10)), skip_reading_prefix_cache=True) for name in "ab"]
    assert run(engine, skipping[0]) == [0]
    assert run(engine, skipping[1]) == [0]
    assert run(engine, request("c", range(10))) == [8]


def test_prefix_cache_different_salts_share_nothing():
    engine = Engine(block_size=4)
    assert run(engine, request("a", range(10), salt="s")) == [0]
    assert run(engine, request("b", range(10)), request("c", range(10), salt="other")) == [0, 0]
    assert run(engine, request("d", range(10), salt="s")) == [8]


def test_prefix_cache_requests_of_one_step_share_blocks():
    engine = Engine(block_size=4)
    engine.add(request("a", range(10)), request("b", range(10)))
    plan = engine.plan()
    assert plan.num_tokens == [10, 2]
    assert plan.new_rows[0].block_ids[:2] == plan.new_rows[1].block_ids[:2]
    engine.apply()
    engine.run()
    assert [cached(engine, "a"), cached(engine, "b")] == [0, 8]


@pytest.mark.parametrize("depth", [1, 2])
def test_prefix_cache_generated_tokens_are_found(depth):
    engine = Engine(depth=depth, block_size=4)
    run(engine, request("turn1", range(6), max_tokens=8))
    conversation = [*range(6), *engine.tokens("turn1")]
    assert run(engine, request("turn2", [*conversation, 3, 3])) == [12]


def test_prefix_cache_block_completed_by_sampling_is_found():
    """With two steps in flight the scheduler learns the token at position 7 only after the last plan."""
    engine = Engine(depth=2, block_size=4)
    run(engine, request("turn1", range(6), max_tokens=3))
    assert run(engine, request("turn2", [*range(6), *engine.tokens("turn1")])) == [8]


def test_chunks_cached_prompt_first_chunk_alone_reports_it():
    engine = Engine(block_size=4)
    run(engine, request("a", range(10)))
    run(engine, request("b", range(10), max_tokens=3))
    assert [chunk.num_cached_tokens for chunk in engine.chunks[ALICE, "b"]] == [8, 0, 0]


def test_stats_preempted_request_counts_first_lookup_only():
    engine = Engine(block_size=1, num_blocks=20, max_model_len=20)
    run(engine, *(request(str(index), [index] * 2, max_tokens=18) for index in range(4)))
    assert engine.scheduler.stats().num_preemptions > 0
    assert all(cached(engine, str(index)) == 0 for index in range(4))


def test_prefix_cache_finished_request_blocks_last_until_needed():
    engine = Engine(block_size=4, num_blocks=8, max_model_len=32)
    run(engine, request("old", [1] * 9, max_tokens=1))
    run(engine, request("other", [2] * 9, max_tokens=1))
    assert run(engine, request("again", [1] * 9, max_tokens=1)) == [8]
    run(engine, request("everything", [3] * 31, max_tokens=1))
    assert run(engine, request("gone", [1] * 9, max_tokens=1)) == [0]


def test_prefix_cache_eviction_takes_tail_before_head():
    engine = Engine(block_size=4, num_blocks=8, max_model_len=32)
    run(engine, request("a", [1] * 21, max_tokens=1))
    run(engine, request("most", [2] * 17, max_tokens=1))
    assert run(engine, request("again", [1] * 21, max_tokens=1)) == [12]


def test_prompt_logprobs_request_skips_cache_and_fills_it():
    engine = Engine(block_size=4)
    run(engine, request("a", range(10)))
    assert run(engine, request("wants", range(12), prompt_logprobs=0)) == [0]
    assert run(engine, request("b", range(12))) == [8]
    run(engine, request("salted", range(12), prompt_logprobs=0, salt="s"))
    assert run(engine, request("c", range(12), salt="s")) == [8]


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_long_prompt_arrive_in_chunks_before_first_token(depth):
    engine = Engine(depth=depth, max_num_batched_tokens=4)
    run(engine, request("r", range(10), max_tokens=2, prompt_logprobs=0))
    chunks = engine.chunks[ALICE, "r"]
    assert [(len(c.token_ids), c.prompt_logprobs and c.prompt_logprobs.start) for c in chunks] == [
        (0, 1),
        (0, 5),
        (1, 9),
        (1, None),
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_after_preemption_continue_where_they_stopped(depth):
    engine = Engine(depth=depth, block_size=2, num_blocks=12, max_model_len=24, max_num_batched_tokens=3)
    engine.add(request("grows", [1, 2], max_tokens=20))
    engine.step()
    engine.add(request("wants", range(20), prompt_logprobs=0))
    engine.run()
    again = next(start for plan in reversed(engine.plans) for start in plan.new_rows)
    assert again.request_id == "wants" and 1 < again.prompt_logprobs_from < again.num_prompt_tokens
    assert again.num_computed_tokens < again.prompt_logprobs_from
    engine.check_as_undisturbed((ALICE, "wants"))
    engine.check_all_free()


def test_prompt_logprobs_all_delivered_cache_is_read():
    engine = Engine(block_size=2, num_blocks=12, max_model_len=24)
    engine.add(request("grows", range(8), max_tokens=16), request("wants", [7, 8], max_tokens=15, prompt_logprobs=0))
    while engine.scheduler.stats().num_preemptions == 0:
        engine.step()
    engine.receive(engine.scheduler.abort(ALICE, ["grows"]))
    engine.run()
    again = next(start for plan in reversed(engine.plans) for start in plan.new_rows)
    assert (again.request_id, again.prompt_logprobs_from, again.num_prompt_tokens) == ("wants", 2, 2)
    assert again.num_computed_tokens > 2
    engine.check_as_undisturbed((ALICE, "wants"))
    engine.check_all_free()


def test_prefix_cache_generated_tokens_of_aborted_request_are_found():
    engine = Engine(block_size=4)
    engine.add(request("turn1", range(6), max_tokens=20))
    for _ in range(7):
        engine.step()
    engine.receive(engine.scheduler.abort(ALICE, ["turn1"]))
    conversation = [*range(6), *engine.tokens("turn1")]
    assert run(engine, request("turn2", [*conversation, 3])) == [12]


def test_prefix_cache_generated_tokens_of_failed_request_are_not_found():
    engine = Engine(block_size=4)
    run(engine, request("beginning", range(6), max_tokens=3))
    turn1 = request("turn1", range(6), max_tokens=20)
    engine.add(msgspec.structs.replace(turn1, skip_reading_prefix_cache=True))
    for _ in range(6):
        engine.step()
    engine.worker.failing.add("turn1")
    engine.step()
    conversation = [*range(6), *engine.tokens("turn1")]
    assert run(engine, request("turn2", [*conversation, 3])) == [8], "those of `beginning`"
