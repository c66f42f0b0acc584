"""Requests that wait for the workers to compile their grammar."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scheduler_fakes import ALICE, BOB, Engine, request, undisturbed

from eagleray.errors import InvalidRequest
from eagleray.messages import grammars
from eagleray.messages.failure import Failure
from eagleray.messages.grammars import Grammar
from eagleray.messages.outputs import FinishReason
from eagleray.messages.steps import StepResult
from eagleray.scheduler.prepared_grammars import PreparedGrammars

G = Grammar(kind="regex", source="a")
H = Grammar(kind="regex", source="b")


def constrained(name: str, grammar: Grammar = G, **kwargs: Any) -> Any:
    message = request(name, (1, 2, 3), **kwargs)
    return msgspec.structs.replace(message, sampling=msgspec.structs.replace(message.sampling, grammar=grammar))


def prepare(engine: Engine, grammar: Grammar = G, failure: Failure | None = None) -> None:
    engine.receive(engine.scheduler.on_grammar_prepared(grammar, failure, seconds=0.001))


def finish(engine: Engine) -> None:
    engine.run()
    for key in engine.messages:
        engine.check_as_undisturbed(key)
    engine.check_all_free()
    assert not engine.scheduler.has_unprepared_grammars


def waiting(engine: Engine) -> tuple[int, int, int]:
    stats = engine.scheduler.stats()
    return stats.num_running, stats.num_waiting, stats.num_deferred


def test_request_waits_for_its_grammar_while_others_run() -> None:
    engine = Engine()
    engine.add(constrained("a"), request("free", [7]), constrained("b"))
    engine.step()
    assert waiting(engine) == (1, 2, 2)
    assert engine.scheduler.first_unprepared_grammars(5) == [G] and engine.scheduler.is_awaited(G)
    prepare(engine)
    assert not engine.scheduler.has_unprepared_grammars and not engine.scheduler.is_awaited(G)
    engine.add(constrained("c"))
    assert waiting(engine) == (1, 3, 0)
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_grammar_queries, stats.num_grammar_hits, stats.num_constrained) == (3, 1, 3)
    assert stats.distributions is not None and sum(stats.distributions.grammar_time.counts) == 1
    finish(engine)


def test_request_whose_grammar_is_refused_fails_and_the_next_one_asks_again() -> None:
    engine = Engine()
    engine.add(constrained("a"), constrained("b", H), constrained("c"))
    prepare(engine, G, Failure.of(InvalidRequest("too large")))
    for name in "ac":
        chunk = engine.last(name)
        assert (chunk.finish_reason, chunk.error, chunk.is_user_error) == (FinishReason.ERROR, "too large", True)
    prepare(engine, H, Failure.of(RuntimeError("a panic")))
    assert engine.last("b").is_user_error is False
    engine.check_all_free()
    engine.add(constrained("d"))
    assert engine.scheduler.first_unprepared_grammars(5) == [G]


def test_unprepared_grammars_are_in_the_order_of_priority_and_arrival() -> None:
    engine = Engine(policy="priority")
    others = [Grammar(kind="regex", source=source) for source in "cdef"]
    for index, grammar in enumerate([G, *others, H]):
        engine.add(constrained(f"r{index}", grammar, priority=-1 if grammar is H else 0))
    engine.add(constrained("urgent", others[3], priority=-2))
    assert engine.scheduler.first_unprepared_grammars(4) == [others[3], H, G, others[0]]


@pytest.mark.parametrize("by_client", [False, True])
def test_request_that_waits_for_its_grammar_can_be_aborted(by_client: bool) -> None:
    engine = Engine()
    engine.add(constrained("a", client=BOB), constrained("b"))
    if by_client:
        assert engine.scheduler.abort_client(BOB) == 1
    else:
        engine.receive(engine.scheduler.abort(BOB, ["a"]))
        assert engine.last("a", BOB).finish_reason is FinishReason.ABORT
    engine.receive(engine.scheduler.abort(ALICE, ["b"]))
    assert not engine.scheduler.has_unprepared_grammars
    engine.check_all_free()
    prepare(engine)  # nobody waits for it any longer
    assert not engine.scheduler.has_work


def test_drain_holds_back_new_requests_and_waits_for_the_grammars_of_those_under_way() -> None:
    engine = Engine()
    first = undisturbed(constrained("resumed"), max_model_len=32)[0][:1]
    engine.add(constrained("new"), constrained("resumed", H, output=first))
    engine.scheduler.drain()
    assert not engine.scheduler.is_drained
    prepare(engine)
    assert not engine.scheduler.is_drained and waiting(engine) == (0, 2, 2)
    prepare(engine, H)
    assert not engine.scheduler.is_drained and waiting(engine) == (0, 2, 1)
    engine.run()
    assert engine.scheduler.is_drained and engine.is_ended((ALICE, "resumed")) and not engine.is_ended((ALICE, "new"))
    engine.scheduler.start()
    finish(engine)


def test_stopped_scheduler_takes_grammars_and_runs_their_requests_afterwards() -> None:
    engine = Engine()
    engine.add(constrained("a"))
    engine.scheduler.stop()
    prepare(engine)
    assert not engine.scheduler.has_work and waiting(engine) == (0, 1, 1)
    engine.scheduler.start()
    finish(engine)


@pytest.mark.parametrize("aborted", [False, True])
def test_grammar_of_a_suspect_is_compiled_at_its_turn(aborted: bool) -> None:
    engine = Engine()
    engine.add(request("b", (1, 2), suspect=True), constrained("a", suspect=True), request("c", (1, 2), suspect=True))
    assert engine.scheduler.announce_starts([G]) == [] and not engine.scheduler.has_unprepared_grammars
    while not engine.is_ended((ALICE, "b")):
        engine.step()
    assert engine.plan() is None
    assert engine.started == ["b"] and engine.scheduler.first_unprepared_grammars(5) == [G]
    assert [chunk.request_id for _, chunk in engine.scheduler.announce_starts([G])] == ["a"]
    assert not engine.scheduler.has_work and not engine.scheduler.is_drained
    if aborted:
        engine.receive(engine.scheduler.abort(ALICE, ["a"]))
    else:
        prepare(engine)
    finish(engine)
    assert engine.started == (["b", "c"] if aborted else ["b", "a", "c"])


def test_request_whose_grammar_was_evicted_waits_for_it_at_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagleray.scheduler.prepared_grammars.MAX_PREPARED_GRAMMARS", 1)
    engine = Engine(max_num_seqs=1)
    engine.add(constrained("a", suspect=True), constrained("b", H, suspect=True), request("c", (1, 2), suspect=True))
    prepare(engine)
    prepare(engine, H)  # which evicts that of a
    assert engine.plan() is None
    assert engine.scheduler.first_unprepared_grammars(5) == [G] and engine.started == []
    engine.receive(engine.scheduler.abort(ALICE, ["a"]))  # whose turn it is
    finish(engine)
    assert engine.started == ["b", "c"]


def test_preempted_request_with_a_grammar_continues_with_equal_tokens() -> None:
    engine = Engine(num_blocks=8, max_num_seqs=3, enable_prefix_caching=False)
    for name in "abc":
        engine.add(constrained(name, max_tokens=20))
    prepare(engine)
    finish(engine)
    assert engine.scheduler.stats().num_preemptions > 0


def test_row_that_has_ended_finishes_without_a_token() -> None:
    engine = Engine()
    engine.add(constrained("a"), request("free", [7]))
    prepare(engine)
    plan = engine.plan()
    assert plan is not None
    row = next(start.row for start in plan.new_rows if start.request_id == "a")
    result = engine.in_flight.pop()
    kept = [(other, token) for other, token in zip(result.rows, result.token_ids, strict=True) if other != row]
    engine.in_flight.append(
        StepResult(step=plan.step, rows=[one for one, _ in kept], token_ids=[token for _, token in kept], ended=[row])
    )
    engine.apply()
    chunk = engine.last("a")
    assert (chunk.finish_reason, chunk.token_ids, chunk.error) == (FinishReason.STOP, [], None)
    engine.run()
    engine.check_all_free()


def test_prepared_grammars_keep_the_last_used_within_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagleray.scheduler.prepared_grammars.MAX_PREPARED_GRAMMARS", 3)
    monkeypatch.setattr("eagleray.scheduler.prepared_grammars.MAX_PREPARED_BYTES", 10)
    made = [Grammar(kind="regex", source=str(number)) for number in range(4)]
    large = Grammar(kind="regex", source="x" * 9)
    prepared = PreparedGrammars()
    for grammar in made[:3]:
        prepared.add(grammar)
    assert prepared.use(made[0])
    prepared.add(made[3])
    assert [prepared.use(grammar) for grammar in made] == [True, False, True, True]
    prepared.add(large)
    assert [prepared.use(grammar) for grammar in (*made, large)] == [False, False, False, True, True]
    small = regex_of_bytes(prepared, "s", 2**20)
    for size, kept in ((grammars.MAX_PREPARED_COMPILED_BYTES - 2**20, True), (2**20 + 1, False)):
        regex_of_bytes(prepared, str(size), size)
        assert (small in prepared) is kept


def regex_of_bytes(prepared: PreparedGrammars, source: str, num_bytes: int) -> Grammar:
    """Add a grammar that takes this memory."""
    grammar = Grammar(kind="regex", source=source)
    prepared.add(grammar, num_bytes)
    return grammar


def test_workers_keep_more_grammars_than_the_scheduler_takes_for_prepared() -> None:
    from eagleray.grammars import cache

    assert cache.MAX_GRAMMARS > grammars.MAX_PREPARED_GRAMMARS
    assert cache.MAX_SOURCE_BYTES > grammars.MAX_PREPARED_BYTES
    assert cache.MAX_COMPILED_BYTES > grammars.MAX_PREPARED_COMPILED_BYTES
