"""Generating requests that end early: clients that disconnect or read slowly, engines that fail, servers that stop."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest
from server_fakes import Call, Chunk, FinishReason, parse_events, serving, settle

from eagleray.server.generation import Generation, GenerationGroup
from eagleray.server.generation_route import ParsedRequest

BODIES = {
    "/v1/completions": {"prompt": ["hello", "again"], "n": 2, "temperature": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {}},
}
AGENT_BODIES = {
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20},
}


@pytest.fixture
def silent(api):
    """An application whose engine sends nothing of its own."""
    api.engine.script = None
    return api


def first_token(api):
    """Return the engine's messages for every request after its first step."""
    return [Chunk(request_id=request.request_id, token_ids=[api.speech[0]]) for request in api.engine.requests]


def metric(api, name):
    return [line for line in api.get("/metrics").text.splitlines() if line.startswith(f"eagleray:{name}")]


@pytest.mark.parametrize("path", BODIES | AGENT_BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_disconnect_aborts_the_requests(silent, path, stream, begun):
    async def leave():
        call = Call(silent.app, path, (BODIES | AGENT_BODIES)[path] | {"stream": stream})
        await settle()
        assert not call.received
        if begun:
            silent.engine.deliver(*first_token(silent))
            await settle()
            assert bool(call.received) == stream
        call.leave()
        await asyncio.wait_for(call.task, 5)

    silent.run(leave())
    assert sorted(silent.engine.aborted) == sorted(request.request_id for request in silent.engine.requests)
    assert silent.client.num_in_flight == 0
    assert f'{path}",status="{200 if begun and stream else 499}"' in "".join(metric(silent, "http_requests_total"))
    num = len(silent.engine.requests)
    assert f'finished_reason="abort",model_name="tiny"}} {num}.0' in "".join(metric(silent, "request_success_total"))


def test_disconnect_while_sending_is_forgotten(api):
    async def leave():
        call = Call(api.app, "/v1/completions", {"prompt": "hello"}, is_whole=False)
        await settle()
        call.leave()
        await asyncio.wait_for(call.task, 5)
        assert not call.received

    api.run(leave())
    assert not api.engine.requests


def test_stream_with_a_slow_reader_is_complete_and_joins_deltas(api):
    async def read_slowly():
        api.engine.script = None
        call = Call(api.app, "/v1/completions", {"prompt": "hello", "stream": True, "return_token_ids": True})
        await settle()
        (request,) = api.engine.requests
        call.may_send.clear()
        for chunk in api.recite(request):
            api.engine.deliver(chunk)
            await settle()
        assert not call.received
        call.may_send.set()
        await call.task
        return parse_events(call.text)

    events = api.run(read_slowly())
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == [*api.speech, api.eos]
    assert len(events) == 2


def failed_chunk(request_id):
    return Chunk(request_id=request_id, finish_reason=FinishReason.ERROR, error="row 3: the logits are not finite")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_has_a_status(silent, path, stream):
    async def fail():
        call = Call(silent.app, path, BODIES[path] | {"stream": stream})
        await settle()
        silent.engine.deliver(failed_chunk(silent.engine.requests[0].request_id))
        await asyncio.wait_for(call.task, 5)
        return call

    call = silent.run(fail())
    assert call.received[0]["status"] == 500
    assert '"code":"request_failed"' in call.text
    assert "the logits are not finite" in call.text
    assert silent.client.num_in_flight == 0


@pytest.mark.parametrize("path", BODIES)
def test_failure_within_a_stream_is_an_event(silent, path):
    async def fail():
        call = Call(silent.app, path, BODIES[path] | {"stream": True})
        await settle()
        silent.engine.deliver(*first_token(silent))
        await settle()
        silent.engine.deliver(failed_chunk(silent.engine.requests[0].request_id))
        await asyncio.wait_for(call.task, 5)
        return call

    call = silent.run(fail())
    assert call.received[0]["status"] == 200
    *events, last = parse_events(call.text)
    assert events
    assert all("choices" in event for event in events)
    assert last == {
        "error": {
            "message": "row 3: the logits are not finite",
            "type": "server_error",
            "param": None,
            "code": "request_failed",
        }
    }
    assert silent.client.num_in_flight == 0
    assert 'finished_reason="error",model_name="tiny"} 0.0' not in "".join(metric(silent, "request_success_total"))


@pytest.mark.parametrize("stream", [False, True])
def test_failure_after_an_engine_exit_names_the_cause(silent, stream):
    async def fail():
        call = Call(silent.app, "/v1/completions", {"prompt": "hello", "stream": stream})
        await settle()
        silent.engine.deliver(*first_token(silent))
        await settle()
        return call

    async def finish(call):
        await asyncio.wait_for(call.task, 5)

    call = silent.run(fail())
    silent.leave("worker tp0-pp0 raised MemoryError: no more")
    silent.run(finish(call))
    assert call.received[0]["status"] == (200 if stream else 500)
    assert "MemoryError: no more" in call.text
    assert '"code":"engine_failed"' in call.text


def test_stopping_server_finishes_requests_and_refuses_new_ones(silent):
    async def start():
        call = Call(silent.app, "/v1/completions", {"prompt": "hello", "max_tokens": 1})
        await settle()
        return call

    async def finish(call):
        (request,) = silent.engine.requests
        silent.engine.deliver(
            Chunk(request_id=request.request_id, token_ids=[silent.speech[0]], finish_reason=FinishReason.LENGTH)
        )
        await asyncio.wait_for(call.task, 5)

    call = silent.run(start())
    assert silent.get("/load").json() == {"server_load": 1}
    silent.stop()
    for path, body in BODIES.items():
        response = silent.post(path, body)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "server_error"
    assert silent.get("/ready").status_code == 503
    assert silent.get("/health").status_code == silent.get("/live").status_code == 200
    silent.run(finish(call))
    assert call.received[0]["status"] == 200
    assert '"text":"hello"' in call.text


def test_request_without_an_engine_gets_503(api):
    api.leave("it was restarted")
    for path, body in BODIES.items():
        response = api.post(path, body)
        assert response.status_code == 503
        assert "retry-after" in response.headers
    for path in ("/health", "/ready", "/ping"):
        response = api.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
    assert api.get("/live").status_code == 200
    assert api.get("/v1/models").json()["data"][0]["max_model_len"] is None
    api.join()
    assert api.get("/health").status_code == 200


def test_unexpected_exception_is_logged_and_not_shown(api, caplog, monkeypatch):
    caplog.set_level(logging.ERROR, logger="eagleray")
    monkeypatch.setattr(logging.getLogger("eagleray"), "propagate", True)

    def broken(*arguments, **options):
        raise KeyError("a secret of ours")

    monkeypatch.setattr(api.client, "generate", broken)
    response = api.post("/v1/completions", {"prompt": "hello"}, headers={"X-Request-Id": "mine"})
    assert response.status_code == 500
    assert "secret" not in response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "mine" in error["message"]
    assert "a secret of ours" in caplog.text
    assert "Traceback" in caplog.text
    assert "mine" in caplog.text


def test_requests_with_the_same_id_are_separate(checkpoint):
    with serving(checkpoint) as api:
        api.engine.script = None

        async def twice():
            calls = [Call(api.app, "/v1/completions", {"prompt": "hello", "max_tokens": 1}) for _ in range(2)]
            await settle()
            for place, request in enumerate(api.engine.requests):
                token = api.speech[place]
                api.engine.deliver(
                    Chunk(request_id=request.request_id, token_ids=[token], finish_reason=FinishReason.LENGTH)
                )
            await asyncio.gather(*(call.task for call in calls))
            return calls

        texts = [call.text for call in api.run(twice())]
    assert all('"id":"cmpl-mine"' in text for text in texts)
    assert ['"text":"hello"' in text for text in texts] == [True, False]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_request_that_has_ended_leaves_no_reference_cycle(api, path, stream):
    """A body may take megabytes, and Python's collector seldom runs."""
    gc.collect()
    gc.disable()
    try:
        assert api.post(path, BODIES[path] | {"stream": stream}).status_code == 200
        kinds = (ParsedRequest, GenerationGroup, Generation)
        # Not isinstance, which asks the objects of other libraries for their class: some warn when they are touched.
        assert [item for item in gc.get_objects() if issubclass(type(item), kinds)] == []
    finally:
        gc.enable()
