from __future__ import annotations

import math

import pytest
from engine_fakes import ENGINE, CountingGroup, ListInbox, ListOutbox

from eagleray.config import build_config
from eagleray.engine.loop import EngineLoop
from eagleray.engine.startup import start_engine
from eagleray.errors import WorkerFailed
from eagleray.executor import Executor
from eagleray.identity import ClientId
from eagleray.messages.lifecycle import Stop
from eagleray.messages.membership import Joined, Left
from eagleray.messages.outputs import Chunks, EngineStats
from eagleray.messages.requests import Abort, Generate
from eagleray.messages.sampling import Sampling, Stopping

CLIENT, OTHER = ClientId("i", 0), ClientId("i", 1)


def generate(request_id: str, *, client: ClientId = CLIENT, num_prompt: int = 5, max_tokens: int = 3) -> Generate:
    return Generate(
        request_id=request_id,
        client=client,
        prompt_token_ids=[1] * num_prompt,
        sampling=Sampling(seed=0),
        stopping=Stopping(max_tokens=max_tokens),
    )


def run(*messages, group: CountingGroup | None = None, depth: int = 1) -> ListOutbox:
    """Run a loop that receives these messages, and `Stop` once it has nothing left to do."""
    group = group or CountingGroup()
    core = start_engine(build_config(enable_prefix_caching=False), Executor(group), depth=depth, deadline=math.inf).core
    inbox, outbox = ListInbox(*messages), ListOutbox()
    inbox.on_empty = lambda: Stop(0.0)
    EngineLoop(ENGINE, core, inbox, outbox).run()
    return outbox


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
