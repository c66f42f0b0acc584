"""Planning that is stopped and started, and changes of weights and cache, against the fake worker."""

from __future__ import annotations

import pytest
from output_chunks import addressed_chunks
from scheduler_fakes import ALICE, Engine, request

from eagleray.messages.outputs import FinishReason


def steps(engine, count):
    for _ in range(count):
        engine.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_64_requests_kept_tokens_equal_undisturbed(depth):
    engine = Engine(depth=depth, max_num_seqs=64, max_num_batched_tokens=100, num_blocks=600)
    engine.add(*(request(str(index), [index % 16, 3, 5], max_tokens=9) for index in range(64)))
    steps(engine, 3)
    engine.scheduler.stop()
    engine.settle()
    held = engine.scheduler.stats()
    engine.add(request("late", [1, 2]))
    assert engine.plan() is None and not engine.scheduler.has_work
    assert engine.scheduler.stats().num_running == held.num_running > 0
    engine.scheduler.start()
    engine.run()
    for key in engine.messages:
        engine.check_as_undisturbed(key)
    assert engine.scheduler.stats().num_preemptions == 0


def test_drain_requests_under_way_finish_others_wait():
    engine = Engine(max_num_seqs=2)
    resumed = request("resumed", [4, 5, 6], max_tokens=5)
    engine.add(*(request(name, [1, 2, 3], max_tokens=6) for name in "abc"))
    engine.step()
    engine.scheduler.drain()
    first = Engine()
    first.add(resumed)
    first.step()
    engine.add(request("late", [1, 2]), first.resumed((ALICE, "resumed")))
    engine.run()
    assert engine.scheduler.is_drained
    assert [engine.is_ended((ALICE, name)) for name in ("a", "b", "resumed", "c", "late")] == [True] * 3 + [False] * 2
    assert engine.scheduler.num_requests == engine.scheduler.stats().num_waiting == 2
    assert engine.scheduler.stats().num_deferred == 2
    engine.receive(engine.scheduler.abort(ALICE, ["c"]))
    engine.scheduler.start()
    assert engine.scheduler.stats().num_deferred == 0
    engine.run()
    assert engine.last("late").finish_reason is FinishReason.LENGTH
    assert engine.last("c").finish_reason is FinishReason.ABORT


def test_drain_preempted_request_finishes():
    engine = Engine(max_model_len=16, block_size=2, num_blocks=8, max_num_seqs=3)
    engine.add(*(request(name, [1, 2, ord(name) % 16], max_tokens=9) for name in "ab"))
    engine.step()
    engine.scheduler.drain()
    engine.scheduler.preempt_all()
    engine.run()
    assert engine.is_ended((ALICE, "a")) and engine.is_ended((ALICE, "b"))


def test_abort_all_running_and_waiting_get_last_chunks():
    engine = Engine(max_num_seqs=1)
    engine.add(request("running", [1, 2]), request("waiting", [3]))
    engine.step()
    engine.receive(engine.scheduler.abort_all())
    assert len(engine.tokens("running")) == 1
    assert {engine.last(name).finish_reason for name in ("running", "waiting")} == {FinishReason.ABORT}
    engine.check_all_free()


def test_reset_prefix_cache_blocks_held_returns_false_and_keeps_it():
    engine = Engine()
    engine.add(request("a", range(9), max_tokens=3))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    engine.add(request("b", range(9), max_tokens=1))
    engine.run()
    assert engine.last("b").num_cached_tokens == 8
    assert engine.scheduler.reset_prefix_cache()
    engine.add(request("c", range(9), max_tokens=1))
    engine.run()
    assert engine.last("c").num_cached_tokens == 0


def test_preempt_all_requests_are_computed_again_tokens_equal_undisturbed():
    engine = Engine()
    engine.add(*(request(name, [1, 2, 3, 4, 5], max_tokens=6) for name in "ab"))
    steps(engine, 2)
    engine.scheduler.preempt_all()
    assert engine.scheduler.reset_prefix_cache()
    engine.run()
    for key in engine.messages:
        engine.check_as_undisturbed(key)
    assert engine.scheduler.stats().num_preemptions == 2


def test_set_weights_request_without_token_starts_its_prompt_again():
    engine = Engine(max_num_batched_tokens=4)
    engine.add(request("a", range(12), max_tokens=2))
    steps(engine, 2)
    engine.apply_update()
    assert engine.scheduler.stats().num_running == 0
    engine.updated.clear()
    engine.first_updates[ALICE, "a"] = 1
    engine.run()
    engine.check_as_undisturbed((ALICE, "a"))
    assert engine.chunks[ALICE, "a"][0].weight_version == "v1"


def test_set_weights_kept_request_continues_and_its_blocks_are_not_found():
    engine = Engine()
    engine.add(request("a", range(8), max_tokens=12))
    steps(engine, 2)
    engine.apply_update()
    assert engine.scheduler.stats().num_running == 1
    engine.run()
    tokens = [*range(8), *engine.tokens("a")]
    engine.add(request("b", tokens[:19], max_tokens=1))
    engine.run()
    assert engine.last("b").num_cached_tokens == 0
    engine.add(request("c", tokens[:19], max_tokens=1))
    engine.run()
    assert engine.last("c").num_cached_tokens == 16


def test_set_weights_version_tagged_where_it_changes_with_steps_in_flight():
    """A new name counts from the next planned step on; steps in flight keep the one that they were planned with."""
    engine = Engine(depth=2)
    engine.add(request("a", [1, 2], max_tokens=8))
    engine.step()
    assert len(engine.in_flight) == 1
    engine.scheduler.set_weights(update=0, version="blue")
    outputs = [engine.scheduler.apply(engine.in_flight.popleft())]
    for _ in range(4):
        engine.plan()
        outputs.append(engine.scheduler.apply(engine.in_flight.popleft()))
    versions = [chunk.weight_version for each in outputs for _, chunk in addressed_chunks(each)]
    assert versions == [None, "blue", None, None, None]


@pytest.mark.parametrize("depth", [1, 2])
def test_on_weights_loaded_blocks_from_before_and_of_running_requests_are_not_found(depth):
    engine = Engine(depth=depth, max_num_seqs=2)
    engine.add(request("before", range(9), max_tokens=1))
    engine.run()
    engine.add(request("running", range(7, 16), max_tokens=9), request("other", range(9), max_tokens=9))
    engine.add(request("waiting", range(9), max_tokens=1))
    engine.step()
    assert len(engine.in_flight) == depth - 1
    engine.scheduler.on_weights_loaded()
    engine.run()
    for key in engine.messages:
        engine.check_as_undisturbed(key)
    assert [engine.chunks[ALICE, name][0].num_cached_tokens for name in ("other", "waiting")] == [8, 0]
    engine.add(request("again", range(7, 16), max_tokens=1), request("found", range(9), max_tokens=1))
    engine.run()
    assert [engine.last(name).num_cached_tokens for name in ("again", "found")] == [0, 8]
    engine.check_all_free()
