from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from engine_fakes import ENGINE, CountingGroup, ListInbox, ListOutbox

from eagleray.config.build import build_config
from eagleray.engine import early_requests
from eagleray.engine.loop import EngineLoop
from eagleray.engine.mailbox import SUPERVISOR
from eagleray.engine.startup import start_engine
from eagleray.errors import EngineFailed, WorkerFailed, WorkerLost
from eagleray.executor.executor import Executor
from eagleray.identity import ClientId, EngineId, successor
from eagleray.messages.lifecycle import Stop, Unreachable
from eagleray.messages.membership import Joined, Left
from eagleray.messages.outputs import Chunks, EngineStats, ExpertLoad
from eagleray.messages.requests import Abort, Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.waves import WaveStarted

OTHER_ENGINE = EngineId("i", 1)
CLIENT, OTHER = ClientId("i", 0), ClientId("i", 1)


def generate(
    request_id: str, *, client: ClientId = CLIENT, num_prompt: int = 5, max_tokens: int = 3, **kwargs: Any
) -> Generate:
    return Generate(
        request_id=request_id,
        client=client,
        prompt_token_ids=[1] * num_prompt,
        sampling=Sampling(seed=0),
        stopping=Stopping(max_tokens=max_tokens),
        **kwargs,
    )


def run(*messages: Any, later: Sequence[Any] = (), group: CountingGroup | None = None, depth: int = 1) -> ListOutbox:
    """Run a loop that receives these messages, when it has nothing left to do `later` ones, and then `Stop`."""
    outbox = ListOutbox()
    open_loop(*messages, later=later, group=group or CountingGroup(), depth=depth, outbox=outbox).run()
    return outbox


def open_loop(
    *messages: Any, later: Sequence[Any] = (), group: CountingGroup, depth: int = 1, outbox: ListOutbox
) -> EngineLoop:
    config = build_config(enable_prefix_caching=False)
    started = start_engine(config, Executor(group), depth=depth, deadline=math.inf)
    inbox, left = ListInbox(*messages), iter([*later, Stop(0.0)])
    inbox.on_empty = lambda: next(left)
    return EngineLoop(ENGINE, started.core, inbox, outbox, has_experts=started.info.has_experts)


def tokens(outbox: ListOutbox, client: ClientId = CLIENT) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for peer, message in outbox.sent:
        if peer == client and isinstance(message, Chunks):
            for chunk in message.chunks:
                found.setdefault(chunk.request_id, []).extend(chunk.token_ids)
    return found


def finishes(outbox: ListOutbox, client: ClientId = CLIENT) -> dict[str, str]:
    return {
        chunk.request_id: chunk.finish_reason
        for peer, message in outbox.sent
        if peer == client and isinstance(message, Chunks)
        for chunk in message.chunks
        if chunk.finish_reason
    }


def test_a_request_is_answered_to_its_client():
    outbox = run(Joined(CLIENT, "c"), Joined(OTHER, "o"), generate("a"), generate("b", client=OTHER, num_prompt=7))
    assert tokens(outbox) == {"a": [5, 6, 7]}
    assert tokens(outbox, OTHER) == {"b": [7, 8, 9]}
    assert finishes(outbox) == {"a": "length"}


def test_chunks_of_one_step_for_one_client_travel_together():
    outbox = run(Joined(CLIENT, "c"), generate("a"), generate("b"))
    messages = [message for _, message in outbox.sent if isinstance(message, Chunks)]
    assert [len(message.chunks) for message in messages] == [2, 2, 2]


def test_a_request_that_overtakes_the_news_of_its_client_is_kept():
    outbox = run(generate("a"), Joined(CLIENT, "c"))
    assert tokens(outbox) == {"a": [5, 6, 7]}


def test_a_request_that_waits_for_the_news_of_its_client_can_be_aborted():
    outbox = run(generate("a"), generate("b"), Abort(CLIENT, ["a"]), Joined(CLIENT, "c"))
    assert tokens(outbox) == {"b": [5, 6, 7]}


def test_what_cannot_run_is_answered_with_the_reason_and_nobody_else_notices():
    outbox = run(Joined(CLIENT, "c"), generate("long", num_prompt=200), generate("a"), generate("a"))
    assert finishes(outbox)["long"] == "error"
    assert tokens(outbox)["a"] == [5, 6, 7]


def test_an_abort_ends_a_request():
    outbox = run(Joined(CLIENT, "c"), generate("a"), generate("b"), Abort(CLIENT, ["a"]))
    assert finishes(outbox) == {"a": "abort", "b": "length"}


def test_requests_of_a_client_that_left_end():
    outbox = run(
        Joined(CLIENT, "c"), Joined(OTHER, "o"), generate("a"), Left(CLIENT, "killed"), generate("b", client=OTHER)
    )
    assert tokens(outbox) == {}
    assert tokens(outbox, OTHER) == {"b": [5, 6, 7]}
    assert CLIENT not in outbox.peers


def test_the_load_is_reported_when_the_engine_falls_idle():
    outbox = run(Joined(CLIENT, "c"), generate("a"))
    (*_, last) = [message for _, message in outbox.sent if isinstance(message, EngineStats)]
    assert (last.num_running, last.num_waiting, last.num_generation_tokens) == (0, 0, 3)
    assert last.num_free_kv_blocks == last.num_kv_blocks


def test_a_workers_failure_ends_the_loop_with_its_cause():
    group = CountingGroup()
    group.fails_at_step = 1
    with pytest.raises(WorkerFailed, match="the worker broke"):
        run(Joined(CLIENT, "c"), generate("a"), group=group)


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("eagleray"), "propagate", True)  # a program that ran here may have ended that
    caplog.set_level(logging.WARNING, logger="eagleray")
    return caplog


def stats(outbox: ListOutbox, client: ClientId) -> list[EngineStats]:
    return [message for peer, message in outbox.sent if peer == client and isinstance(message, EngineStats)]


def test_every_client_is_told_the_load():
    outbox = run(Joined(CLIENT, "c"), Joined(OTHER, "o"), generate("a"))
    for client in (CLIENT, OTHER):
        assert stats(outbox, client)[-1].num_generation_tokens == 3


def test_a_client_that_joins_an_idle_engine_is_told_its_load_at_once():
    outbox = run(Joined(CLIENT, "c"), generate("a"), later=[Joined(OTHER, "o")])
    assert [one.num_generation_tokens for one in stats(outbox, OTHER)] == [3]


def test_a_request_goes_on_after_what_it_has_generated_elsewhere():
    outbox = run(Joined(CLIENT, "c"), generate("a", output_token_ids=[8, 9]), generate("b", output_token_ids=[8] * 3))
    assert tokens(outbox) == {"a": [7], "b": []}
    assert finishes(outbox) == {"a": "length", "b": "error"}


def test_the_start_of_a_suspect_is_told_before_the_step_that_it_may_not_survive():
    group, outbox = CountingGroup(), ListOutbox()
    group.dies_at_step = 0
    loop = open_loop(Joined(CLIENT, "c"), generate("a", is_suspect=True), group=group, outbox=outbox)
    with pytest.raises(WorkerLost):
        loop.run()
    (chunk,) = [chunk for _, message in outbox.sent if isinstance(message, Chunks) for chunk in message.chunks]
    assert (chunk.request_id, chunk.is_started) == ("a", True)


def test_a_client_that_cannot_be_reached_is_told_to_the_supervisor():
    outbox = ListOutbox()
    outbox.broken = [CLIENT]
    open_loop(Joined(CLIENT, "c"), group=CountingGroup(), outbox=outbox).run()
    assert [message for peer, message in outbox.sent if peer == SUPERVISOR] == [Unreachable(ENGINE, CLIENT)]


@pytest.mark.parametrize("messages", [(), (Joined(CLIENT, "c"), generate("a"))])
def test_an_engine_that_cannot_reach_its_supervisor_ends(messages):
    outbox = ListOutbox()
    outbox.broken = [SUPERVISOR]
    with pytest.raises(EngineFailed, match="the connection to the supervisor broke"):
        open_loop(*messages, group=CountingGroup(), outbox=outbox).run()


def test_the_next_incarnation_of_a_client_is_somebody_else():
    outbox = run(
        Joined(CLIENT, "c"),
        generate("a"),
        Left(CLIENT, "killed"),
        Joined(successor(CLIENT), "d"),
        generate("a", client=successor(CLIENT), num_prompt=7),
    )
    assert tokens(outbox) == {}
    assert tokens(outbox, successor(CLIENT)) == {"a": [7, 8, 9]}


def test_what_is_no_message_is_dropped(log):
    outbox = run(msgspec.ValidationError("no such field"), Joined(CLIENT, "c"), generate("a"))
    assert tokens(outbox) == {"a": [5, 6, 7]}
    assert "no such field" in log.text


def test_who_does_not_join_is_forgotten(log, monkeypatch):
    monkeypatch.setattr(early_requests, "PATIENCE_SECONDS", -1.0)
    outbox = run(generate("a"), later=[Joined(CLIENT, "c"), generate("b")])
    assert tokens(outbox) == {"b": [5, 6, 7]}
    assert "client-0 has asked for something, but did not join" in log.text


def test_clients_hear_how_busy_the_experts_were_when_work_is_done_and_when_they_are_new():
    outbox = run(Joined(CLIENT, "c"), generate("a"), later=[Joined(OTHER, "o")], group=CountingGroup(top_k=2))
    loads = [(peer, int(load.counts[0, 0])) for peer, load in outbox.sent if isinstance(load, ExpertLoad)]
    assert (CLIENT, 8) in loads
    assert (OTHER, 8) in loads


def test_a_model_without_experts_has_no_such_news():
    outbox = run(Joined(CLIENT, "c"), generate("a"))
    assert not any(isinstance(message, ExpertLoad) for _, message in outbox.sent)


def test_what_only_engines_that_share_experts_say_is_dropped_elsewhere(log):
    outbox = run(WaveStarted(OTHER_ENGINE, 1, 1), Joined(CLIENT, "c"), generate("a"))
    assert tokens(outbox) == {"a": [5, 6, 7]}
    assert "shares its experts with nobody" in log.text
