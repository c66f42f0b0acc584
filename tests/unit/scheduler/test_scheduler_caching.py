"""What is found in the prefix cache, by whom, and for how long."""

from __future__ import annotations

import pytest
from scheduler_fakes import ALICE, Engine, request


def cached(engine, request_id):
    """As told in the first chunk."""
    return engine.chunks[ALICE, request_id][0].num_cached_tokens


def run(engine, *messages):
    engine.add(*messages)
    engine.run()
    for message in messages:
        engine.check_as_undisturbed((message.client, message.request_id))
    engine.check_all_free()
    return [cached(engine, message.request_id) for message in messages]


def test_full_blocks_are_found_again():
    engine = Engine(block_size=4)
    assert run(engine, request("first", range(10))) == [0]
    assert run(engine, request("same", range(10)), request("longer", range(14))) == [8, 8]
    assert run(engine, request("branch", [0, 1, 2, 3, 9, 9, 9, 9])) == [4]


def test_at_least_one_token_is_computed():
    engine = Engine(block_size=4)
    assert run(engine, request("first", range(8))) == [0]
    assert run(engine, request("same", range(8))) == [4]


def test_off_means_off():
    engine = Engine(enable_prefix_caching=False)
    assert run(engine, request("first", range(10))) + run(engine, request("same", range(10))) == [0, 0]
    assert engine.scheduler.stats().num_prefix_queries == 0


def test_salts_separate():
    engine = Engine(block_size=4)
    assert run(engine, request("a", range(10), salt="s")) == [0]
    assert run(engine, request("b", range(10)), request("c", range(10), salt="other")) == [0, 0]
    assert run(engine, request("d", range(10), salt="s")) == [8]


def test_requests_of_the_same_step_share():
    engine = Engine(block_size=4)
    engine.add(request("a", range(10)), request("b", range(10)))
    plan = engine.plan()
    assert plan.num_tokens == [10, 2]
    assert plan.starts[0].block_ids[:2] == plan.starts[1].block_ids[:2]
    engine.apply()
    engine.run()
    assert [cached(engine, "a"), cached(engine, "b")] == [0, 8]


@pytest.mark.parametrize("depth", [1, 2])
def test_generated_tokens_are_found_too(depth):
    engine = Engine(depth=depth, block_size=4)
    run(engine, request("turn1", range(6), max_tokens=8))
    conversation = [*range(6), *engine.tokens("turn1")]
    assert run(engine, request("turn2", [*conversation, 3, 3])) == [12]


def test_a_block_whose_last_token_becomes_known_late_is_found_too():
    """With two steps in flight the token at position 7 is computed before its id is known here, and none is planned
    after that."""
    engine = Engine(depth=2, block_size=4)
    run(engine, request("turn1", range(6), max_tokens=3))
    assert run(engine, request("turn2", [*range(6), *engine.tokens("turn1")])) == [8]


def test_only_the_first_chunk_tells_what_was_cached():
    engine = Engine(block_size=4)
    run(engine, request("a", range(10)))
    run(engine, request("b", range(10), max_tokens=3))
    assert [chunk.num_cached_tokens for chunk in engine.chunks[ALICE, "b"]] == [8, 0, 0]


def test_the_first_start_counts_not_the_one_after_a_preemption():
    engine = Engine(block_size=1, num_blocks=20, max_model_len=20)
    run(engine, *(request(str(index), [index] * 2, max_tokens=18) for index in range(4)))
    assert engine.scheduler.stats().num_preemptions > 0
    assert all(cached(engine, str(index)) == 0 for index in range(4))


def test_a_cached_prefix_lasts_until_its_blocks_are_needed():
    engine = Engine(block_size=4, num_blocks=8, max_model_len=32)
    run(engine, request("old", [1] * 9, max_tokens=1))
    run(engine, request("other", [2] * 9, max_tokens=1))
    assert run(engine, request("again", [1] * 9, max_tokens=1)) == [8]
    run(engine, request("everything", [3] * 31, max_tokens=1))
    assert run(engine, request("gone", [1] * 9, max_tokens=1)) == [0]


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    engine = Engine(block_size=4, num_blocks=8, max_model_len=32)
    run(engine, request("a", [1] * 21, max_tokens=1))
    run(engine, request("most", [2] * 17, max_tokens=1))
    assert run(engine, request("again", [1] * 21, max_tokens=1)) == [12]


def test_prompt_logprobs_read_no_cache_but_others_may_read_theirs():
    engine = Engine(block_size=4)
    run(engine, request("a", range(10)))
    assert run(engine, request("wants", range(12), prompt_logprobs=0)) == [0]
    assert run(engine, request("b", range(12))) == [8]
    run(engine, request("salted", range(12), prompt_logprobs=0, salt="s"))
    assert run(engine, request("c", range(12), salt="s")) == [8]


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_come_in_chunks_before_the_first_token(depth):
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
def test_prompt_logprobs_go_on_where_a_preemption_cut_them_off(depth):
    engine = Engine(depth=depth, block_size=2, num_blocks=12, max_model_len=24, max_num_batched_tokens=3)
    engine.add(request("grows", [1, 2], max_tokens=20))
    engine.step()
    engine.add(request("wants", range(20), prompt_logprobs=0))
    engine.run()
    again = next(start for plan in reversed(engine.plans) for start in plan.starts)
    assert again.request_id == "wants" and 1 < again.prompt_logprobs_from < again.num_prompt_tokens
    assert again.num_computed_tokens < again.prompt_logprobs_from
    engine.check_as_undisturbed((ALICE, "wants"))
    engine.check_all_free()


def test_with_all_prompt_logprobs_delivered_the_cache_may_be_read():
    engine = Engine(block_size=2, num_blocks=12, max_model_len=24)
    engine.add(request("grows", range(8), max_tokens=16), request("wants", [7, 8], max_tokens=15, prompt_logprobs=0))
    while engine.scheduler.stats().num_preemptions == 0:
        engine.step()
    engine.take(engine.scheduler.abort(ALICE, ["grows"]))
    engine.run()
    again = next(start for plan in reversed(engine.plans) for start in plan.starts)
    assert (again.request_id, again.prompt_logprobs_from, again.num_prompt_tokens) == ("wants", 2, 2)
    assert again.num_computed_tokens > 2
    engine.check_as_undisturbed((ALICE, "wants"))
    engine.check_all_free()
