"""The load generator against a scripted server: requests, their times and their outcomes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Coroutine
from contextlib import closing
from typing import Any

import pytest
from load_server import Handler, Request, answer, load_server

from eagleray.errors import EagleRayError, Unavailable, UserError
from eagleray_bench.http_client import HttpClient
from eagleray_bench.load import CompletedRequest, FailedRequest, LoadResult, generate_load
from eagleray_bench.serving import describe, panels, serving_figures
from eagleray_bench.target import open_target
from eagleray_bench.workload import Workload, make_requests

SECONDS = 30.0
"""Limit of every test's event loop."""
BODY = json.dumps({"prompt": [1, 2, 3], "max_tokens": 3}).encode()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, SECONDS))


def load(handler: Handler, count: int = 1, **options: Any) -> LoadResult:
    """`count` requests to a server with this handler."""

    async def work() -> LoadResult:
        async with load_server(handler) as server, HttpClient(server.url) as client:
            defaults = {"send_times": [0.0] * count, "max_concurrency": None, "timeout": SECONDS}
            return await generate_load(client, "/v1/completions", [BODY] * count, **defaults | options)

    return run(work())


def test_generate_load_answers_are_complete_and_timed():
    found = load(answer, 5)
    assert [type(outcome) for outcome in found.outcomes] == [CompletedRequest] * 5
    for outcome in found.outcomes:
        assert len(outcome.token_times) == 3
        assert outcome.sent <= outcome.token_times[0] <= outcome.token_times[-1] <= outcome.ended
        assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (3, 3)
    assert found.duration >= max(outcome.ended for outcome in found.outcomes) - found.outcomes[0].sent
    assert 0 < found.peak_concurrency <= 5
    assert found.cpu_share >= 0


async def refuse(request: Request) -> None:
    await request.reply(503, b'{"error": {"message": "no engine is ready"}}')


async def refuse_as_others_do(request: Request) -> None:
    await request.reply(422, b'{"detail": "field required"}')


async def refuse_in_plain_text(request: Request) -> None:
    await request.reply(502, b"Bad Gateway")


async def refuse_without_a_body(request: Request) -> None:
    await request.reply(500, b"")


async def close_connection(request: Request) -> None:
    await request.close()


async def close_halfway(request: Request) -> None:
    await request.begin_stream()
    await request.event({"choices": [{"text": "a"}]})
    await request.close()


async def end_early(request: Request) -> None:
    await request.begin_stream()
    await request.event({"choices": [{"text": "a"}]})
    await request.end_stream()


async def fail_halfway(request: Request) -> None:
    await request.begin_stream()
    await request.event({"choices": [{"text": "a"}]})
    await request.event({"error": {"message": "the engine ended"}})
    await request.event(b"[DONE]")
    await request.end_stream()


async def send_no_http(request: Request) -> None:
    await request.write(b"220 mail.example.org ESMTP\r\n\r\n")


async def never(request: Request) -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    ("handler", "kind", "cause"),
    [
        (refuse, "HTTP 503", "no engine is ready"),
        (refuse_as_others_do, "HTTP 422", "field required"),
        (refuse_in_plain_text, "HTTP 502", "Bad Gateway"),
        (refuse_without_a_body, "HTTP 500", "without an explanation"),
        (close_connection, "connection", "closed the connection before the end of its answer"),
        (close_halfway, "connection", "closed the connection before the end of its answer"),
        (end_early, "bad answer", "the stream ended before its end was announced"),
        (fail_halfway, "bad answer", "the engine ended"),
        (send_no_http, "connection", "not HTTP"),
    ],
)
def test_generate_load_failing_request_is_a_failure_with_its_cause(handler, kind, cause):
    (outcome,) = load(handler).outcomes
    assert isinstance(outcome, FailedRequest)
    assert outcome.kind == kind
    assert cause in outcome.cause


def test_generate_load_slow_answer_is_a_failure():
    (outcome,) = load(never, timeout=0.2).outcomes
    assert outcome == FailedRequest("timed out", "no complete answer within 0.2 s")


async def close_at_the_end(request: Request) -> None:
    await request.begin_stream()
    await request.event({"choices": [{"text": "a", "finish_reason": "length"}]})
    await request.event(b"[DONE]")
    await request.close()


def test_generate_load_connection_closed_after_the_end_is_no_failure():
    (outcome,) = load(close_at_the_end).outcomes
    assert isinstance(outcome, CompletedRequest)


def test_generate_load_no_server_fails_every_request():
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens

        async def work() -> LoadResult:
            options = {"send_times": [0, 0], "max_concurrency": None, "timeout": SECONDS}
            async with HttpClient(f"http://127.0.0.1:{taken.getsockname()[1]}") as client:
                return await generate_load(client, "/", [BODY] * 2, **options)

        outcomes = run(work()).outcomes
    assert {outcome.kind for outcome in outcomes} == {"connection"}
    assert "Connection refused" in outcomes[0].cause


def test_serving_figures_failures_are_counted_by_kind_alone():
    async def every_second(request: Request) -> None:
        turns.append(request)
        await (answer(request) if len(turns) % 2 else refuse(request))

    turns: list[Request] = []
    found = load(every_second, 6, max_concurrency=1)
    requests = make_requests(
        Workload(num_prompts=6, random_input_len=3, random_output_len=3).shapes(), vocab_size=99, seed=0
    )
    figures = serving_figures(found, requests)
    assert figures.num_completed == 3
    assert [(failure.kind, failure.count) for failure in figures.failures] == [("HTTP 503", 3)]
    assert (figures.num_input_tokens, figures.num_output_tokens) == (9, 9)
    assert figures.ttft_ms.count == figures.tpot_ms.count == figures.e2e_ms.count == 3
    assert figures.itl_ms.count == 6
    assert [len(panel.values) for panel in panels(found)] == [3, 6, 3]
    text = describe(figures)
    assert "3 completed, 3 failed" in text
    assert "3 failed, the first one: no engine is ready" in text


def test_serving_figures_only_failures_have_no_times():
    requests = make_requests(Workload(num_prompts=2).shapes(), vocab_size=99, seed=0)
    figures = serving_figures(load(refuse, 2), requests)
    assert (figures.num_completed, figures.output_tokens_per_s, figures.ttft_ms) == (0, 0.0, None)
    assert "0 completed, 2 failed" in describe(figures)


def test_generate_load_max_concurrency_is_never_exceeded():
    async def work() -> tuple[int, int]:
        async with load_server() as server, HttpClient(server.url) as client:
            options = {"send_times": [0.0] * 20, "max_concurrency": 3, "timeout": SECONDS}
            found = await generate_load(client, "/v1/completions", [BODY] * 20, **options)
            assert len(found.outcomes) == len(server.requests) == 20
            assert server.num_connections <= 3, "connections are used again"
            return found.peak_concurrency, server.peak

    assert max(run(work())) <= 3


def test_generate_load_requests_wait_for_their_send_times():
    found = load(answer, 3, send_times=[0.0, 0.1, 0.2])
    assert min(found.lateness) >= 0
    assert found.duration >= 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_concurrency": 0}, "--max-concurrency must be at least 1, but it is 0"),
        ({"timeout": 0.0}, "--request-timeout must be greater than 0 seconds, but it is 0"),
    ],
)
def test_generate_load_limit_not_positive_raises(options, message):
    with pytest.raises(UserError, match=message):
        load(answer, **options)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_http_client_url_without_host_and_port_raises(url):
    with pytest.raises(UserError, match="expected http://HOST:PORT"):
        HttpClient(url)


# Requests and the models that they are sent to.

OPTIONS: dict[str, Any] = {"model": None, "temperature": 0.0, "ignore_eos": True, "timeout": SECONDS}


def sent_requests(endpoint: str, handler: Handler = answer, **options: Any) -> list[Request]:
    """The requests that a short benchmark sends."""

    async def work() -> list[Request]:
        async with load_server(handler) as server, HttpClient(server.url, api_key="secret") as client:
            target = await open_target(client, endpoint=endpoint, **OPTIONS | options)
            shapes = Workload(num_prompts=1, random_input_len=40, random_output_len=2).shapes()
            if target.is_chat:
                shapes = (await target.word_lengths()).in_words(shapes)
            (request,) = make_requests(shapes, vocab_size=100, seed=0)
            answered = await target.send_first(request)
            assert answered.num_prompt_tokens == 40
            return server.requests

    return run(work())


def test_target_completion_sends_token_ids_and_standard_fields():
    models, request = sent_requests("/v1/completions")
    assert models.path == "/v1/models"
    assert request.headers["authorization"] == "Bearer secret"
    prompt = request.body.pop("prompt")
    assert len(prompt) == 40
    assert request.body == {
        "model": "small",
        "max_tokens": 2,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_target_without_ignore_eos_leaves_the_field_out():
    assert "ignore_eos" not in sent_requests("/v1/completions", ignore_eos=False, model="other")[-1].body


def test_target_chat_prompt_has_the_requested_number_of_tokens():
    request = sent_requests("/v1/chat/completions")[-1]
    (message,) = request.body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 16, "(40 tokens - 8 of the template) / 2 per word"


def test_open_target_unknown_model_raises_with_the_served_names():
    with pytest.raises(UserError, match=r"--model big: not served at http://\S+; served there: small, other"):
        sent_requests("/v1/completions", model="big")


def test_open_target_unknown_endpoint_raises():
    with pytest.raises(UserError, match="--endpoint /v1/embeddings: expected /v1/completions or /v1/chat/completions"):
        sent_requests("/v1/embeddings")


async def require_a_key(request: Request) -> None:
    await request.reply(401, b"{}")


def test_open_target_missing_api_key_raises():
    with pytest.raises(UserError, match="wants an API key: give it with --api-key or OPENAI_API_KEY"):
        sent_requests("/v1/completions", require_a_key)


def test_open_target_no_models_listed_requires_a_name():
    with pytest.raises(UserError, match=r"/v1/models lists no models \(503\): name one with --model"):
        sent_requests("/v1/completions", refuse)
    with pytest.raises(EagleRayError, match=r"the first request to http://.* failed: no engine is ready"):
        sent_requests("/v1/completions", refuse, model="any")


def test_open_target_no_server_raises_one_sentence():
    async def work() -> None:
        async with HttpClient("http://127.0.0.1:9") as client:
            await open_target(client, endpoint="/v1/completions", **OPTIONS)

    with pytest.raises(Unavailable, match=r"no server answers at http://127\.0\.0\.1:9: Connection refused"):
        run(work())
