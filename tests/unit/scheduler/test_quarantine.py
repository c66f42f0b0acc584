"""Suspects in quarantine. The fake engine checks at every step that at most one of them is computed, and none before
its start was announced."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_fakes import ALICE, BOB, Engine, request, undisturbed

from eagleray.messages.outputs import FinishReason


def suspect(name, prompt=(1, 2, 3), **kwargs):
    return request(name, prompt, suspect=True, **kwargs)


def starts(engine):
    return [start.request_id for plan in engine.plans for start in plan.new_rows]


def finish(engine):
    engine.run()
    for key in engine.messages:
        engine.check_as_undisturbed(key)
    engine.check_all_free()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_quarantine_suspects_run_one_at_a_time_beside_others(depth):
    engine = Engine(depth=depth)
    engine.add(suspect("a", max_tokens=6), suspect("b", max_tokens=2), suspect("c", max_tokens=3), request("free", [7]))
    engine.step()
    assert starts(engine)[:2] == ["a", "free"] and engine.started == ["a"]
    finish(engine)
    assert starts(engine) == ["a", "free", "b", "c"]
    assert engine.started == ["a", "b", "c"]


def test_quarantine_queued_suspects_count_as_waiting():
    engine = Engine()
    engine.add(*(suspect(name) for name in "abc"))
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_deferred) == (1, 2, 2)
    finish(engine)


def test_early_chunks_suspect_admitted_announces_its_start():
    engine = Engine()
    engine.add(suspect("a"), request("free", [7]))
    assert engine.scheduler.pop_early_chunks() == []
    assert engine.scheduler.plan() is not None
    ((client, chunk),) = engine.scheduler.pop_early_chunks()
    assert (client, chunk.request_id, chunk.is_started, chunk.token_ids) == (ALICE, "a", True, [])
    assert engine.scheduler.pop_early_chunks() == []


def test_early_chunks_requests_that_ask_run_together():
    engine = Engine()
    asking = [msgspec.structs.replace(request(name, [7]), announce_start=True) for name in "ab"]
    engine.add(*asking, request("free", [7]))
    engine.step()
    assert engine.started == ["a", "b"]
    assert sorted(starts(engine)) == ["a", "b", "free"]
    finish(engine)


def test_early_chunks_cached_tokens_are_reported_by_the_next_chunk():
    engine = Engine(block_size=4)
    engine.add(request("a", range(10)))
    finish(engine)
    engine.add(suspect("b", range(10)))
    finish(engine)
    assert engine.chunks[ALICE, "b"][0].num_cached_tokens == 8


def test_quarantine_next_suspect_waits_for_steps_in_flight():
    """With two suspects in one step, an exit of the engine would not identify the one at fault."""
    (token, *_), _, _ = undisturbed(suspect("a"), max_model_len=32)
    engine = Engine()
    engine.add(suspect("a", eos=(token,)), suspect("b"))
    engine.plan()
    engine.plan()
    assert [chunk.finish_reason for chunk in engine.apply()] == [FinishReason.STOP]
    assert engine.plan() is None
    engine.apply()
    assert [start.request_id for start in engine.plan().new_rows] == ["b"]
    finish(engine)


def test_quarantine_preempted_suspect_keeps_its_turn():
    engine = Engine(block_size=2, num_blocks=6, max_model_len=12, enable_prefix_caching=False)
    engine.add(request("old", range(4), max_tokens=8), suspect("a", range(4), max_tokens=8), suspect("b", [1]))
    finish(engine)
    assert engine.scheduler.stats().num_preemptions > 0
    assert starts(engine).count("a") > 1
    assert engine.started == ["a", "b"]
    assert starts(engine)[-1] == "b"


def test_quarantine_priorities_more_urgent_suspect_is_next():
    engine = Engine(policy="priority")
    engine.add(suspect("a", priority=5))
    engine.step()
    engine.add(*(suspect(name, priority=priority) for name, priority in [("b", 3), ("c", -1), ("d", 3)]))
    finish(engine)
    assert engine.started == ["a", "c", "b", "d"]


def test_quarantine_suspect_without_row_is_not_announced():
    engine = Engine(max_num_seqs=1)
    engine.add(request("runs", [1], max_tokens=3), suspect("a"))
    engine.step()
    assert engine.started == []
    finish(engine)
    assert engine.started == ["a"]


@pytest.mark.parametrize("aborted", ["a", "b", "c"])
def test_quarantine_aborted_suspect_releases_the_next(aborted):
    engine = Engine()
    engine.add(*(suspect(name) for name in "abc"))
    engine.step()
    engine.receive(engine.scheduler.abort(ALICE, [aborted]))
    finish(engine)
    assert engine.last(aborted).finish_reason is FinishReason.ABORT
    assert engine.started == ["a", *(name for name in "bc" if name != aborted)]


def test_quarantine_failed_suspect_releases_the_next():
    engine = Engine()
    engine.worker.failing.add("a")
    engine.add(suspect("a"), suspect("b"))
    finish(engine)
    assert engine.last("a").finish_reason is FinishReason.ERROR
    assert engine.started == ["a", "b"]


def test_quarantine_client_left_releases_the_next():
    engine = Engine()
    engine.add(suspect("a", client=BOB), suspect("b", client=BOB), suspect("c"))
    engine.step()
    assert engine.scheduler.abort_client(BOB) == 2
    engine.run()
    engine.check_as_undisturbed((ALICE, "c"))
    engine.check_all_free()
    assert engine.started == ["a", "c"]
