from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from engine_fakes import ENGINE, CountingGroup, ListInbox, ListOutbox
from output_chunks import chunks_of

from eagleray.config.build import build_config
from eagleray.engine import early_requests
from eagleray.engine.loop import EngineLoop
from eagleray.engine.startup import start_engine
from eagleray.errors import EngineFailed, WorkerFailed, WorkerLost
from eagleray.executor.executor import Executor
from eagleray.identity import SUPERVISOR, ClientId, EngineId, next_incarnation
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


def run(
    *messages: Any, later: Sequence[Any] = (), group: CountingGroup | None = None, executor: str = "auto"
) -> ListOutbox:
    """Run a loop that receives these messages, the `later` ones once it is idle, and then `Stop`."""
    outbox = ListOutbox()
    open_loop(*messages, later=later, group=group or CountingGroup(), executor=executor, outbox=outbox).run()
    return outbox


def open_loop(
    *messages: Any, later: Sequence[Any] = (), group: CountingGroup, executor: str = "auto", outbox: ListOutbox
) -> EngineLoop:
    config = build_config(enable_prefix_caching=False, executor=executor)
    started = start_engine(config, Executor(group), deadline=math.inf)
    inbox, left = ListInbox(*messages), iter([*later, Stop(0.0)])
    inbox.on_empty = lambda: next(left)
    return EngineLoop(ENGINE, started.core, inbox, outbox, has_experts=started.info.has_experts)


def tokens(outbox: ListOutbox, client: ClientId = CLIENT) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for peer, message in outbox.sent:
        if peer == client and isinstance(message, Chunks):
            for chunk in chunks_of(message):
                found.setdefault(chunk.request_id, []).extend(chunk.token_ids)
    return found


def finishes(outbox: ListOutbox, client: ClientId = CLIENT) -> dict[str, str]:
    return {
        chunk.request_id: chunk.finish_reason
        for peer, message in outbox.sent
        if peer == client and isinstance(message, Chunks)
        for chunk in chunks_of(message)
        if chunk.finish_reason
    }


def test_loop_request_chunks_go_to_its_client():
    outbox = run(Joined(CLIENT, "c"), Joined(OTHER, "o"), generate("a"), generate("b", client=OTHER, num_prompt=7))
    assert tokens(outbox) == {"a": [5, 6, 7]}
    assert tokens(outbox, OTHER) == {"b": [7, 8, 9]}
    assert finishes(outbox) == {"a": "length"}


def test_loop_chunks_of_one_step_and_client_are_one_message():
    outbox = run(Joined(CLIENT, "c"), generate("a"), generate("b"))
    messages = [message for _, message in outbox.sent if isinstance(message, Chunks)]
    assert [len(chunks_of(message)) for message in messages] == [2, 2, 2]


def test_loop_request_before_joined_is_kept():
    outbox = run(generate("a"), Joined(CLIENT, "c"))
    assert tokens(outbox) == {"a": [5, 6, 7]}


def test_loop_early_request_can_be_aborted():
    outbox = run(generate("a"), generate("b"), Abort(CLIENT, ["a"]), Joined(CLIENT, "c"))
    assert tokens(outbox) == {"b": [5, 6, 7]}


def test_loop_invalid_request_fails_alone_with_reason():
    outbox = run(Joined(CLIENT, "c"), generate("long", num_prompt=200), generate("a"), generate("a"))
    assert finishes(outbox)["long"] == "error"
    assert tokens(outbox)["a"] == [5, 6, 7]


def test_loop_abort_finishes_request():
    outbox = run(Joined(CLIENT, "c"), generate("a"), generate("b"), Abort(CLIENT, ["a"]))
    assert finishes(outbox) == {"a": "abort", "b": "length"}


def test_loop_client_left_its_requests_are_aborted():
    outbox = run(
        Joined(CLIENT, "c"), Joined(OTHER, "o"), generate("a"), Left(CLIENT, "killed"), generate("b", client=OTHER)
    )
    assert tokens(outbox) == {}
    assert tokens(outbox, OTHER) == {"b": [5, 6, 7]}
    assert CLIENT not in outbox.peers


def test_loop_engine_becomes_idle_reports_load():
    outbox = run(Joined(CLIENT, "c"), generate("a"))
    (*_, last) = [message for _, message in outbox.sent if isinstance(message, EngineStats)]
    assert (last.num_running, last.num_waiting, last.num_generation_tokens) == (0, 0, 3)
    assert last.num_free_kv_blocks == last.num_kv_blocks


def test_loop_worker_failure_raises_its_cause():
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


def test_loop_load_is_sent_to_every_client():
    outbox = run(Joined(CLIENT, "c"), Joined(OTHER, "o"), generate("a"))
    for client in (CLIENT, OTHER):
        assert stats(outbox, client)[-1].num_generation_tokens == 3


def test_loop_client_joins_idle_engine_receives_load_at_once():
    outbox = run(Joined(CLIENT, "c"), generate("a"), later=[Joined(OTHER, "o")])
    assert [one.num_generation_tokens for one in stats(outbox, OTHER)] == [3]


def test_loop_resumed_request_continues_after_its_output():
    outbox = run(Joined(CLIENT, "c"), generate("a", output_token_ids=[8, 9]), generate("b", output_token_ids=[8] * 3))
    assert tokens(outbox) == {"a": [7], "b": []}
    assert finishes(outbox) == {"a": "length", "b": "error"}


def test_loop_suspect_start_is_sent_before_its_first_step():
    group, outbox = CountingGroup(), ListOutbox()
    group.dies_at_step = 0
    loop = open_loop(Joined(CLIENT, "c"), generate("a", is_suspect=True), group=group, outbox=outbox)
    with pytest.raises(WorkerLost):
        loop.run()
    (chunk,) = [chunk for _, message in outbox.sent if isinstance(message, Chunks) for chunk in message.chunks]
    assert (chunk.request_id, chunk.is_started) == ("a", True)


def test_loop_unreachable_client_is_reported_to_supervisor():
    outbox = ListOutbox()
    outbox.broken = [CLIENT]
    open_loop(Joined(CLIENT, "c"), group=CountingGroup(), outbox=outbox).run()
    assert [message for peer, message in outbox.sent if peer == SUPERVISOR] == [Unreachable(ENGINE, CLIENT)]


@pytest.mark.parametrize("messages", [(), (Joined(CLIENT, "c"), generate("a"))])
def test_loop_unreachable_supervisor_raises_engine_failed(messages):
    outbox = ListOutbox()
    outbox.broken = [SUPERVISOR]
    with pytest.raises(EngineFailed, match="the connection to the supervisor broke"):
        open_loop(*messages, group=CountingGroup(), outbox=outbox).run()


def test_loop_next_incarnation_of_a_client_is_another_client():
    outbox = run(
        Joined(CLIENT, "c"),
        generate("a"),
        Left(CLIENT, "killed"),
        Joined(next_incarnation(CLIENT), "d"),
        generate("a", client=next_incarnation(CLIENT), num_prompt=7),
    )
    assert tokens(outbox) == {}
    assert tokens(outbox, next_incarnation(CLIENT)) == {"a": [7, 8, 9]}


def test_loop_malformed_message_is_dropped(log):
    outbox = run(msgspec.ValidationError("no such field"), Joined(CLIENT, "c"), generate("a"))
    assert tokens(outbox) == {"a": [5, 6, 7]}
    assert "no such field" in log.text


def test_loop_client_never_joins_requests_are_dropped(log, monkeypatch):
    monkeypatch.setattr(early_requests, "JOIN_TIMEOUT_SECONDS", -1.0)
    outbox = run(generate("a"), later=[Joined(CLIENT, "c"), generate("b")])
    assert tokens(outbox) == {"b": [5, 6, 7]}
    assert "client-0: dropped its requests, because the client has not joined" in log.text


def test_loop_expert_load_is_sent_when_idle_and_to_new_clients():
    outbox = run(Joined(CLIENT, "c"), generate("a"), later=[Joined(OTHER, "o")], group=CountingGroup(top_k=2))
    loads = [(peer, int(load.counts[0, 0])) for peer, load in outbox.sent if isinstance(load, ExpertLoad)]
    assert (CLIENT, 8) in loads
    assert (OTHER, 8) in loads


def test_loop_model_without_experts_sends_no_expert_load():
    outbox = run(Joined(CLIENT, "c"), generate("a"))
    assert not any(isinstance(message, ExpertLoad) for _, message in outbox.sent)


def test_loop_expert_group_message_without_group_is_dropped(log):
    outbox = run(WaveStarted(OTHER_ENGINE, 1, 1), Joined(CLIENT, "c"), generate("a"))
    assert tokens(outbox) == {"a": [5, 6, 7]}
    assert "belongs to no expert group" in log.text
