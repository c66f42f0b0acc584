"""Requests that engines have died with. That no two of them are computed at a time, and none before its start was told,
the fake engine checks at every step."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_fakes import ALICE, BOB, Engine, request, undisturbed

from eagleray.messages.outputs import FinishReason


def suspect(name, prompt=(1, 2, 3), **kwargs):
    return request(name, prompt, suspect=True, **kwargs)


def starts(engine):
    return [start.request_id for plan in engine.plans for start in plan.starts]


def finish(engine):
    engine.run()
    for key in engine.messages:
        engine.check_as_undisturbed(key)
    engine.check_all_free()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_at_a_time_in_order_and_nobody_else_waits_for_them(depth):
    engine = Engine(depth=depth)
    engine.add(suspect("a", max_tokens=6), suspect("b", max_tokens=2), suspect("c", max_tokens=3), request("free", [7]))
    engine.step()
    assert starts(engine)[:2] == ["a", "free"] and engine.started == ["a"]
    finish(engine)
    assert starts(engine) == ["a", "free", "b", "c"]
    assert engine.started == ["a", "b", "c"]


def test_those_that_wait_for_their_turn_count_as_waiting():
    engine = Engine()
    engine.add(*(suspect(name) for name in "abc"))
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 2)
    finish(engine)


def test_the_start_is_told_with_the_plan_and_nothing_else_is():
    engine = Engine()
    engine.add(suspect("a"), request("free", [7]))
    assert engine.scheduler.pop_early_chunks() == []
    assert engine.scheduler.plan() is not None
    ((client, chunk),) = engine.scheduler.pop_early_chunks()
    assert (client, chunk.request_id, chunk.is_started, chunk.token_ids) == (ALICE, "a", True, [])
    assert engine.scheduler.pop_early_chunks() == []


def test_a_start_is_told_of_requests_that_ask_for_it_and_they_run_together():
    engine = Engine()
    asking = [msgspec.structs.replace(request(name, [7]), announce_start=True) for name in "ab"]
    engine.add(*asking, request("free", [7]))
    engine.step()
    assert engine.started == ["a", "b"]
    assert sorted(starts(engine)) == ["a", "b", "free"]
    finish(engine)


def test_the_first_chunk_with_something_in_it_tells_what_was_cached():
    engine = Engine(block_size=4)
    engine.add(request("a", range(10)))
    finish(engine)
    engine.add(suspect("b", range(10)))
    finish(engine)
    assert engine.chunks[ALICE, "b"][0].num_cached_tokens == 8


def test_the_next_waits_until_no_step_computes_the_last_one():
    """Its engine would not know which of the two has ended it."""
    (token, *_), _, _ = undisturbed(suspect("a"), max_model_len=32)
    engine = Engine()
    engine.add(suspect("a", eos=(token,)), suspect("b"))
    engine.plan()
    engine.plan()
    assert [chunk.finish_reason for chunk in engine.apply()] == [FinishReason.STOP]
    assert engine.plan() is None
    engine.apply()
    assert [start.request_id for start in engine.plan().starts] == ["b"]
    finish(engine)


def test_a_preempted_one_keeps_its_turn_and_is_not_told_again():
    engine = Engine(block_size=2, num_blocks=6, max_model_len=12, enable_prefix_caching=False)
    engine.add(request("old", range(4), max_tokens=8), suspect("a", range(4), max_tokens=8), suspect("b", [1]))
    finish(engine)
    assert engine.scheduler.stats().num_preemptions > 0
    assert starts(engine).count("a") > 1
    assert engine.started == ["a", "b"]
    assert starts(engine)[-1] == "b"


def test_the_more_urgent_has_the_next_turn():
    engine = Engine(policy="priority")
    engine.add(suspect("a", priority=5))
    engine.step()
    engine.add(*(suspect(name, priority=priority) for name, priority in [("b", 3), ("c", -1), ("d", 3)]))
    finish(engine)
    assert engine.started == ["a", "c", "b", "d"]


def test_one_that_has_the_turn_but_no_row_yet_is_not_told():
    engine = Engine(max_num_seqs=1)
    engine.add(request("runs", [1], max_tokens=3), suspect("a"))
    engine.step()
    assert engine.started == []
    finish(engine)
    assert engine.started == ["a"]


@pytest.mark.parametrize("aborted", ["a", "b", "c"])
def test_an_abort_ends_it_wherever_it_is_and_the_next_has_its_turn(aborted):
    engine = Engine()
    engine.add(*(suspect(name) for name in "abc"))
    engine.step()
    engine.take(engine.scheduler.abort(ALICE, [aborted]))
    finish(engine)
    assert engine.last(aborted).finish_reason is FinishReason.ABORT
    assert engine.started == ["a", *(name for name in "bc" if name != aborted)]


def test_one_that_fails_makes_room_for_the_next():
    engine = Engine()
    engine.worker.failing.add("a")
    engine.add(suspect("a"), suspect("b"))
    finish(engine)
    assert engine.last("a").finish_reason is FinishReason.ERROR
    assert engine.started == ["a", "b"]


def test_the_turn_of_a_client_that_left_is_over():
    engine = Engine()
    engine.add(suspect("a", client=BOB), suspect("b", client=BOB), suspect("c"))
    engine.step()
    assert engine.scheduler.abort_client(BOB) == 2
    engine.run()
    engine.check_as_undisturbed((ALICE, "c"))
    engine.check_all_free()
    assert engine.started == ["a", "c"]
