"""Several engines behind the application: the engine of each request, and the answers when engines exit and restart."""

from __future__ import annotations

import asyncio
import json

import pytest
from server_fakes import ENGINE, SPEECH, Call, Chunk, FinishReason, serving, settle, stats

from eagleray.identity import EngineId, next_incarnation
from eagleray.messages.requests import Generate

BODIES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 2}},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
}
OTHER = EngineId("test", 1)
RANK, SESSION = "X-data-parallel-rank", "X-Session-ID"


@pytest.fixture
def pair(checkpoint):
    """An application with two engines."""
    with serving(checkpoint, data_parallel_size=2) as api:
        api.join(OTHER)
        yield api


def receivers(api):
    """The engines that requests were sent to, in order."""
    sent = zip(api.engine.receivers, api.engine.sent, strict=True)
    return [peer for peer, message in sent if isinstance(message, Generate)]


@pytest.mark.parametrize("path", BODIES)
def test_rank_header_chooses_the_engine(pair, path):
    for rank in (1, 1, 0, 1):
        assert pair.post(path, BODIES[path], headers={RANK: str(rank)}).status_code == 200
    assert [engine.rank for engine in receivers(pair)] == [1, 1, 0, 1]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("rank", ["2", "-1", "+1", "1.0", "one", "", "1" * 30, "1,1", "¹"])
def test_rank_header_of_a_missing_rank_is_refused(pair, path, rank):
    response = pair.post(path, BODIES[path], headers={RANK: rank.encode()})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == RANK
    assert "ranks 0-1" in error["message"]
    assert not pair.engine.requests


def test_rank_header_of_another_host_is_refused(checkpoint):
    engine = EngineId("test", 3)
    with serving(checkpoint, data_parallel_size=4, data_parallel_rank=3) as api:
        api.leave("it is another's", is_planned=True)
        api.join(engine)
        assert api.post("/v1/completions", {"prompt": "hello"}, headers={RANK: "3"}).status_code == 200
        response = api.post("/v1/completions", {"prompt": "hello"}, headers={RANK: "0"})
        assert (response.status_code, "of rank 3" in response.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("path", BODIES)
def test_session_header_keeps_the_engine(pair, path):
    for session in ("a", "b", "c", "d", "e", "f", "g", "h"):
        before = len(receivers(pair))
        for _ in range(3):
            assert pair.post(path, BODIES[path], headers={SESSION: session}).status_code == 200
        assert len(set(receivers(pair)[before:])) == 1
    assert set(receivers(pair)) == {ENGINE, OTHER}


@pytest.mark.parametrize("session", ["", "two words", "x" * 257, "ä"])
def test_session_header_without_a_name_is_refused(pair, session):
    response = pair.post("/v1/completions", BODIES["/v1/completions"], headers={SESSION: session.encode()})
    assert (response.status_code, response.json()["error"]["param"]) == (400, SESSION)
    longest = pair.post("/v1/completions", BODIES["/v1/completions"], headers={SESSION: "x" * 256})
    assert longest.status_code == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_timeout_aborts_the_request_with_504(api, path, stream):
    api.engine.script = None
    response = api.post(path, BODIES[path] | {"timeout": 0.05, "stream": stream})
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "deadline_exceeded")
    assert api.client.num_in_flight == 0
    assert api.engine.aborted == [request.request_id for request in api.engine.requests]


def test_timeout_in_a_stream_is_an_event(api):
    api.engine.script = lambda request: iter([Chunk(request_id=request.request_id, token_ids=[api.speech[0]])])
    response = api.post("/v1/completions", {"prompt": "hello", "timeout": 0.05, "stream": True})
    assert response.status_code == 200
    *_, last, done = response.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("path", BODIES)
def test_timeout_not_given_is_the_option(checkpoint, path):
    with serving(checkpoint, request_timeout=0.05) as api:
        api.engine.script = None
        for body in ({}, {"timeout": None}):
            assert api.post(path, BODIES[path] | body).status_code == 504
    with serving(checkpoint, request_timeout=1000) as api:
        api.engine.script = None
        assert api.post(path, BODIES[path] | {"timeout": 0.05}).status_code == 504


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("timeout", [0, -1, "soon", [5]])
def test_timeout_not_above_zero_is_refused(api, path, timeout):
    response = api.post(path, BODIES[path] | {"timeout": timeout})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_queue_when_full_refuses_with_429(checkpoint, path, stream):
    with serving(checkpoint, max_queued_requests=2) as api:
        api.engine.script = None

        async def fill():
            calls = [Call(api.app, path, BODIES[path]) for _ in range(2)]
            await settle()
            return calls

        async def finish(calls):
            for request in api.engine.requests:
                api.engine.deliver(
                    Chunk(request_id=request.request_id, token_ids=[api.speech[0]], finish_reason=FinishReason.LENGTH)
                )
            await asyncio.wait_for(asyncio.gather(*(call.task for call in calls)), 5)

        calls = api.run(fill())
        response = api.post(path, BODIES[path] | {"stream": stream})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert (
            'admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 1.0' in api.get("/metrics").text
        )
        assert api.get("/load").json() == {"server_load": 2}
        assert api.get("/ready").status_code == 200
        api.run(finish(calls))
        assert [call.received[0]["status"] for call in calls] == [200, 200]
        api.engine.script = api.recite
        assert api.post(path, BODIES[path]).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_request_whose_engine_exits_continues_on_another(pair, stream):
    pair.engine.script = None

    async def begin():
        call = Call(pair.app, "/v1/completions", {"prompt": "hello", "stream": stream})
        await settle()
        (request,) = pair.engine.requests
        chunks = list(pair.recite(request))[:2]
        for chunk in chunks:
            pair.engine.deliver(chunk, engine=receivers(pair)[0])
        await settle()
        return call

    async def finish(call):
        _, second = pair.engine.requests
        assert second.output_token_ids == pair.speech[:2]
        assert len(set(receivers(pair))) == 2
        for chunk in pair.recite(second):
            pair.engine.deliver(chunk, engine=receivers(pair)[1])
        await asyncio.wait_for(call.task, 5)

    call = pair.run(begin())
    pair.leave("it was killed by SIGKILL", receivers(pair)[0], returns=True)
    pair.run(finish(call))
    assert call.received[0]["status"] == 200
    if stream:
        events = [line.removeprefix("data: ") for line in call.text.strip().split("\n\n")][:-1]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    else:
        text = json.loads(call.text)["choices"][0]["text"]
    assert text == SPEECH
    page = pair.get("/metrics").text
    assert 'eagleray:requests_resumed_total{model_name="tiny"} 1.0' in page
    assert 'eagleray:time_to_next_token_after_failure_seconds_count{model_name="tiny"} 1.0' in page


@pytest.mark.parametrize("path", BODIES)
def test_request_while_an_engine_restarts_waits(api, path):
    api.leave("it was killed by SIGKILL", returns=True)
    for status in ("/ready", "/health", "/ping"):
        response = api.get(status)
        assert response.status_code == 503
        assert "killed by SIGKILL" in response.json()["error"]["message"]
        assert "retry-after" in response.headers
    assert api.get("/live").status_code == 200

    async def call():
        call = Call(api.app, path, BODIES[path])
        await settle()
        assert not call.received
        return call

    waiting = api.run(call())
    api.join(next_incarnation(ENGINE))
    api.run(asyncio.wait_for(waiting.task, 5))
    assert waiting.received[0]["status"] == 200
    assert receivers(api) == [next_incarnation(ENGINE)]
    for status in ("/ready", "/health"):
        assert api.get(status).status_code == 200


def test_request_that_waited_in_vain_names_the_cause(api):
    api.leave("it was killed by SIGKILL", returns=True)
    response = api.post("/v1/completions", BODIES["/v1/completions"] | {"timeout": 0.05})
    assert response.status_code == 504
    assert "waiting for an engine" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_request_without_an_engine_to_come_is_refused_with_the_cause(api, path):
    api.leave("worker tp0-pp0 raised MemoryError", returns=False)
    for response in (api.post(path, BODIES[path]), api.get("/ready"), api.get("/health")):
        assert response.status_code == 503
        assert "raised MemoryError" in response.json()["error"]["message"]


def test_stopping_server_whose_engine_restarts_refuses_requests(api):
    api.leave("it was killed by SIGKILL", returns=True)
    api.stop()
    response = api.post("/v1/completions", BODIES["/v1/completions"])
    assert (response.status_code, "stopping" in response.json()["error"]["message"]) == (503, True)
    assert "stopping" in api.get("/ready").json()["error"]["message"]


def test_server_info_has_engines_and_configuration(checkpoint):
    options = {
        "data_parallel_size": 3,
        "api_key": ["secret-of-ours"],
        "ray_runtime_env": {"env_vars": {"SOME_TOKEN": "secret-of-theirs"}, "pip": ["x"]},
        "log_config_file": '{"version": 1, "handlers": {"h": {"key": "secret-of-a-service"}}}',
        "otlp_traces_endpoint": "http://user:secret-of-a-collector@127.0.0.1:1",
    }
    headers = {"Authorization": "Bearer secret-of-ours"}
    with serving(checkpoint, **options) as api:
        assert api.get("/server_info").status_code == 401
        restarted = EngineId("test", 2, 4)
        api.join(restarted, max_model_len=48)
        api.deliver(stats(restarted, num_running=3, num_kv_blocks=32, num_free_kv_blocks=30))
        response = api.get("/server_info", headers=headers)
        assert "secret-of" not in response.text
        info = response.json()
        assert info["ranks"] == [0, 1, 2]
        assert [(engine["rank"], engine["incarnation"]) for engine in info["engines"]] == [(0, 0), (2, 4)]
        assert info["engines"][0]["load"] is None
        assert info["engines"][1]["load"] == {
            "num_running": 3,
            "num_waiting": 0,
            "num_kv_blocks": 32,
            "num_free_kv_blocks": 30,
        }
        assert info["engines"][1]["info"]["max_model_len"] == 48
        assert info["cause"] is None
        assert info["config"]["parallel"]["data_parallel_size"] == 3
        assert info["config"]["ray"]["ray_runtime_env"] == {"env_vars": {"SOME_TOKEN": "(hidden)"}, "pip": ["x"]}
        assert "api_key" not in info["config"]["serving"]
        api.leave("it was killed")
        api.leave("it was killed, too", restarted)
        info = api.get("/server_info", headers=headers).json()
        assert (info["engines"], "it was killed, too" in info["cause"]) == ([], True)


def test_metrics_have_every_engine(pair):
    pair.deliver(stats(num_running=3))
    pair.deliver(stats(OTHER, num_running=4))
    page = pair.get("/metrics").text
    for rank, count in [(0, 3), (1, 4)]:
        assert f'eagleray:num_requests_running{{engine="{rank}",model_name="tiny"}} {count}.0' in page
    pair.leave("it was killed", returns=True)
    pair.join(next_incarnation(ENGINE))
    pair.deliver(stats(next_incarnation(ENGINE)))
    assert 'eagleray:engine_restarts_total{engine="0",model_name="tiny"} 1.0' in pair.get("/metrics").text


def test_openapi_has_the_headers_of_requests(api):
    page = api.get("/openapi.json").json()
    for path in BODIES:
        parameters = page["paths"][path]["post"]["parameters"]
        assert [(parameter["name"], parameter["in"]) for parameter in parameters] == [
            (RANK, "header"),
            (SESSION, "header"),
            ("endpoint-load-metrics-format", "header"),
        ]


@pytest.mark.parametrize("path", BODIES)
def test_load_header_shows_all_engines_in_the_wanted_form(pair, path):
    def header(wanted):
        answer = pair.post(path, BODIES[path], headers={"endpoint-load-metrics-format": wanted})
        assert answer.status_code == 200
        return answer.headers.get("endpoint-load-metrics")

    assert header("TEXT") is None
    pair.deliver(stats(num_kv_blocks=30, num_free_kv_blocks=10, num_waiting=1))
    pair.deliver(stats(OTHER, num_kv_blocks=10, num_free_kv_blocks=5, num_waiting=2))
    assert header("TEXT") == "TEXT named_metrics.kv_cache_usage_perc=0.625, named_metrics.num_requests_waiting=3.0"
    kind, value = header("json").split(" ", 1)
    assert (kind, json.loads(value)) == (
        "JSON",
        {"named_metrics": {"kv_cache_usage_perc": 0.625, "num_requests_waiting": 3.0}},
    )
    assert header("BIN") is None
    assert "endpoint-load-metrics" not in pair.post(path, BODIES[path]).headers
