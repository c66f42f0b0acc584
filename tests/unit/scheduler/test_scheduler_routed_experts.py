"""Routed experts of each token are sent at once, in order and exactly once, wherever the token was computed."""

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


def sent(engine, request_id):
    """Return (start, count) of the routed experts in each chunk; None for a chunk without them."""
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
def test_routed_experts_are_sent_with_the_step_that_computed_them(depth, caching):
    engine = Engine(depth=depth, max_num_batched_tokens=4, enable_prefix_caching=caching)
    run(engine, wants("r", range(10), max_tokens=3))
    chunks = engine.chunks[ALICE, "r"]
    assert [len(chunk.token_ids) for chunk in chunks] == [0, 0, 1, 1, 1]
    assert sent(engine, "r") == [(0, 4), (4, 4), (8, 2), (10, 1), (11, 1)]


def test_routed_experts_from_position_earlier_ones_are_not_sent():
    engine = Engine(max_num_batched_tokens=4)
    run(engine, wants("middle", range(10), first=5), wants("output", range(10), first=10, salt="s"))
    assert sent(engine, "middle")[0] == (5, 3)
    assert sent(engine, "output") == [None, (10, 1), (11, 1), (12, 1)]


def test_routed_experts_last_token_has_none():
    engine = Engine(depth=2)
    run(engine, wants("r", range(5), first=5, max_tokens=1))
    assert sent(engine, "r") == [None]


def test_routed_experts_not_requested_nothing_is_captured_or_sent():
    engine = Engine()
    run(engine, request("a", range(10)))
    assert all(plan.capture_rows == [] for plan in engine.plans)
    assert sent(engine, "a") == [None] * 4


def test_routed_experts_cached_tokens_are_sent_from_the_store():
    engine = Engine(block_size=4)
    run(engine, wants("a", range(10)))
    run(engine, wants("b", range(10)))
    assert cached(engine, "b") == 8
    assert sent(engine, "b")[0] == (0, 10)


def test_routed_experts_block_without_them_is_computed_again():
    engine = Engine(block_size=4)
    run(engine, request("plain", range(10)))
    run(engine, wants("first", range(10)))
    run(engine, wants("second", range(10)))
    run(engine, request("plain again", range(10)))
    assert [cached(engine, name) for name in ("first", "second", "plain again")] == [0, 8, 8]


def test_routed_experts_twin_takes_over_while_the_first_is_read():
    engine = Engine(block_size=4)
    engine.add(request("plain", range(10), max_tokens=8))
    engine.step()
    run(engine, wants("first", range(10), max_tokens=8), wants("second", range(10)))
    assert [cached(engine, name) for name in ("first", "second")] == [0, 8]


def test_routed_experts_blocks_before_start_need_none():
    engine = Engine(block_size=4)
    run(engine, request("plain", range(14)))
    run(engine, wants("a", range(14), first=8))
    assert (cached(engine, "a"), sent(engine, "a")[0]) == (8, (8, 6))
    run(engine, wants("b", range(14), first=7))
    assert (cached(engine, "b"), sent(engine, "b")[0]) == (4, (7, 7))


@pytest.mark.parametrize("fails", [False, True])
def test_routed_experts_requests_of_one_step_share_them(fails):
    """The shared experts are stored only when the step is applied, even if the first request fails in it."""
    engine = Engine(block_size=4)
    engine.worker.failing |= {"a"} if fails else set()
    engine.add(wants("a", range(10)), wants("b", range(10)))
    assert engine.plan().num_tokens == [10, 2]
    engine.apply()
    assert sent(engine, "b") == [(0, 10)]
    engine.run()
    engine.check_as_undisturbed((ALICE, "b"))
    assert engine.last("a").finish_reason == (FinishReason.ERROR if fails else FinishReason.LENGTH)


def test_routed_experts_of_ended_run_are_stored_for_others():
    engine = Engine(depth=2, block_size=4)
    engine.add(wants("a", range(10)))
    engine.plan()
    engine.receive(engine.scheduler.abort(ALICE, ["a"]))
    engine.add(wants("b", range(10)))
    assert engine.plan().num_tokens == [2]
    assert engine.apply() == []
    engine.apply()
    assert sent(engine, "b") == [(0, 10)]
    engine.run()
    engine.check_as_undisturbed((ALICE, "b"))
    engine.check_all_free()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_routed_experts_after_preemption_are_not_sent_twice(depth, caching):
    engine = Engine(depth=depth, block_size=2, num_blocks=12, max_model_len=24, enable_prefix_caching=caching)
    run(engine, *(wants(str(index), [index] * 3, max_tokens=20) for index in range(4)))
    assert engine.scheduler.stats().num_preemptions > 0


def test_routed_experts_aborted_request_has_those_of_applied_steps():
    engine = Engine(depth=2)
    engine.add(wants("a", range(6), max_tokens=9))
    engine.step()
    engine.step()
    (last,) = engine.receive(engine.scheduler.abort(ALICE, ["a"]))
    assert (last.finish_reason, last.routed_experts) == (FinishReason.ABORT, b"")
    assert sent(engine, "a") == [(0, 6), (6, 1), None]


def test_routed_experts_resumed_request_continues_at_first_missing():
    first, second = Engine(), Engine()
    first.add(wants("a", range(6), max_tokens=9))
    first.step()
    first.step()
    run(second, first.resumed((ALICE, "a")))
    assert sent(second, "a")[0] == (7, 1)


def test_routed_experts_beyond_256_take_two_bytes():
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
def test_admission_routed_experts_from_outside_known_tokens_is_refused(first):
    with pytest.raises(InvalidRequest, match="between 0 and 6") as raised:
        Engine().add(wants("a", range(6), first=first))
    assert raised.value.param == "routed_experts_from"


def test_admission_routed_experts_without_routing_is_refused():
    with pytest.raises(InvalidRequest, match="enable_return_routed_experts"):
        Engine(routing=None).add(wants("a", range(6)))


def test_scheduler_without_routing_has_no_store():
    scheduler: Scheduler = Engine(routing=None).scheduler
    assert scheduler._routed is None
