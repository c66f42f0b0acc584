"""Which experts computed each token: told at once, in order and once, wherever a token was computed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from scheduler_fakes import ALICE, ROUTING, Engine, request

from eagleray.errors import InvalidRequest
from eagleray.messages.outputs import FinishReason
from eagleray.scheduler.scheduler import Scheduler


def wants(request_id, prompt, *, first=0, **options):
    return request(request_id, prompt, routed_experts_from=first, **options)


def told(engine, request_id):
    """(start, count) of the rows in each chunk; None where it has none."""
    start, parts = engine.messages[ALICE, request_id].routed_experts_from, []
    for chunk in engine.chunks[ALICE, request_id]:
        count = len(ROUTING.rows(chunk.routed_experts))
        parts.append((start, count) if count else None)
        start = start + count if count else start
    return parts


def run(engine, *messages):
    engine.add(*messages)
    engine.run()
    for message in messages:
        engine.check_as_undisturbed((message.client, message.request_id))
    engine.check_all_free()


def cached(engine, request_id):
    return engine.chunks[ALICE, request_id][0].num_cached_tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_rows_leave_with_the_step_that_computed_them(depth, caching):
    engine = Engine(depth=depth, max_num_batched_tokens=4, enable_prefix_caching=caching)
    run(engine, wants("r", range(10), max_tokens=3))
    chunks = engine.chunks[ALICE, "r"]
    assert [len(chunk.token_ids) for chunk in chunks] == [0, 0, 1, 1, 1]
    assert told(engine, "r") == [(0, 4), (4, 4), (8, 2), (10, 1), (11, 1)]


def test_rows_from_a_position_of_the_prompt_on():
    engine = Engine(max_num_batched_tokens=4)
    run(engine, wants("middle", range(10), first=5), wants("output", range(10), first=10, salt="s"))
    assert told(engine, "middle")[0] == (5, 3)
    assert told(engine, "output") == [None, (10, 1), (11, 1), (12, 1)]


def test_a_last_token_that_is_not_computed_has_no_row():
    engine = Engine(depth=2)
    run(engine, wants("r", range(5), first=5, max_tokens=1))
    assert told(engine, "r") == [None]


def test_nothing_is_planned_or_told_if_nobody_asks():
    engine = Engine()
    run(engine, request("a", range(10)))
    assert all(plan.capture == [] for plan in engine.plans)
    assert told(engine, "a") == [None] * 4


def test_what_is_found_in_the_cache_comes_with_its_rows():
    engine = Engine(block_size=4)
    run(engine, wants("a", range(10)))
    run(engine, wants("b", range(10)))
    assert cached(engine, "b") == 8
    assert told(engine, "b")[0] == (0, 10)


def test_a_block_without_rows_is_computed_again_and_then_has_them():
    engine = Engine(block_size=4)
    run(engine, request("plain", range(10)))
    run(engine, wants("first", range(10)))
    run(engine, wants("second", range(10)))
    run(engine, request("plain again", range(10)))
    assert [cached(engine, name) for name in ("first", "second", "plain again")] == [0, 8, 8]


def test_the_twin_takes_over_while_the_other_is_read():
    engine = Engine(block_size=4)
    engine.add(request("plain", range(10), max_tokens=8))
    engine.step()
    run(engine, wants("first", range(10), max_tokens=8), wants("second", range(10)))
    assert [cached(engine, name) for name in ("first", "second")] == [0, 8]


def test_blocks_before_the_first_wanted_row_need_none():
    engine = Engine(block_size=4)
    run(engine, request("plain", range(14)))
    run(engine, wants("a", range(14), first=8))
    assert (cached(engine, "a"), told(engine, "a")[0]) == (8, (8, 6))
    run(engine, wants("b", range(14), first=7))
    assert (cached(engine, "b"), told(engine, "b")[0]) == (4, (7, 7))


@pytest.mark.parametrize("fails", [False, True])
def test_requests_of_one_step_share_blocks_and_rows(fails):
    """Although the rows of one are there only when the step is applied, and even if that one fails."""
    engine = Engine(block_size=4)
    engine.worker.failing |= {"a"} if fails else set()
    engine.add(wants("a", range(10)), wants("b", range(10)))
    assert engine.plan().num_tokens == [10, 2]
    engine.apply()
    assert told(engine, "b") == [(0, 10)]
    engine.run()
    engine.check_as_undisturbed((ALICE, "b"))
    assert engine.last("a").finish_reason == (FinishReason.ERROR if fails else FinishReason.LENGTH)


def test_rows_of_a_run_that_ended_before_they_came_are_there_for_others():
    engine = Engine(depth=2, block_size=4)
    engine.add(wants("a", range(10)))
    engine.plan()
    engine.take(engine.scheduler.abort(ALICE, ["a"]))
    engine.add(wants("b", range(10)))
    assert engine.plan().num_tokens == [2]
    assert engine.apply() == []
    engine.apply()
    assert told(engine, "b") == [(0, 10)]
    engine.run()
    engine.check_as_undisturbed((ALICE, "b"))
    engine.check_all_free()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_are_told_nothing_twice(depth, caching):
    engine = Engine(depth=depth, block_size=2, num_blocks=12, max_model_len=24, enable_prefix_caching=caching)
    run(engine, *(wants(str(index), [index] * 3, max_tokens=20) for index in range(4)))
    assert engine.scheduler.stats().num_preemptions > 0


def test_an_aborted_request_has_all_rows_of_the_steps_before():
    engine = Engine(depth=2)
    engine.add(wants("a", range(6), max_tokens=9))
    engine.step()
    engine.step()
    (last,) = engine.take(engine.scheduler.abort(ALICE, ["a"]))
    assert (last.finish_reason, last.routed_experts) == (FinishReason.ABORT, b"")
    assert told(engine, "a") == [(0, 6), (6, 1), None]


def test_a_request_goes_on_from_the_first_row_that_is_missing():
    first, second = Engine(), Engine()
    first.add(wants("a", range(6), max_tokens=9))
    first.step()
    first.step()
    run(second, first.resumed((ALICE, "a")))
    assert told(second, "a")[0] == (7, 1)


def test_more_than_256_experts_take_two_bytes():
    routing = msgspec.structs.replace(ROUTING, num_experts=512)
    engine = Engine(block_size=4, routing=routing)
    for name in ("a", "b"):
        engine.add(wants(name, range(10), max_tokens=1))
        engine.plan()
        result = engine.in_flight.pop()
        engine.in_flight.append(
            msgspec.structs.replace(result, routed_experts=result.routed_experts.astype(np.uint16) + 256)
        )
        engine.apply()
    a, b = (routing.rows(engine.last(name).routed_experts) for name in ("a", "b"))
    assert len(a) == len(b) == 10 and min(a.min(), b.min()) >= 256
    assert np.array_equal(a[:8], b[:8])


@pytest.mark.parametrize("first", [-1, 7])
def test_a_start_outside_of_the_known_tokens_is_refused(first):
    with pytest.raises(InvalidRequest, match="between 0 and 6") as raised:
        Engine().add(wants("a", range(6), first=first))
    assert raised.value.param == "routed_experts_from"


def test_an_engine_that_cannot_say_refuses():
    with pytest.raises(InvalidRequest, match="enable_return_routed_experts"):
        Engine(routing=None).add(wants("a", range(6)))


def test_an_engine_without_routing_keeps_no_rows():
    scheduler: Scheduler = Engine(routing=None).scheduler
    assert scheduler._routed is None
