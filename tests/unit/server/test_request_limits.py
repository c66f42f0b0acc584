"""Requests that would take more than their share are refused before they are tokenized or sent."""

from __future__ import annotations

import asyncio
import tracemalloc
import weakref

import pytest
from server_fakes import Call, serving, settle

from eagleray.client.preprocess import MAX_LOGPROB_TOKEN_IDS
from eagleray.messages.outputs import Chunk, FinishReason
from eagleray.messages.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from eagleray.server import memory_return


def error_of(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_completions_too_many_sequences_names_counts_and_option(api):
    body = {"prompt": ["x"] * 4000, "max_tokens": 1, "n": 1024, "temperature": 1}
    error = error_of(api.post("/v1/completions", body))
    assert "4096000 sequences (4000 prompts x `n` 1024)" in error["message"]
    assert "at most 1024 (option `max_seqs_per_request`)" in error["message"]
    assert (error["param"], api.engine.sent) == ("n", [])
    error = error_of(api.post("/v1/completions", {"prompt": ["x"] * 2000}))
    assert error["param"] == "prompt"


def test_completions_more_sequences_than_may_wait_is_a_bad_request(checkpoint):
    with serving(checkpoint, max_queued_requests=3) as api:
        error = error_of(api.post("/v1/completions", {"prompt": "x", "n": 4}))
        assert "at most 3 (option `max_queued_requests`)" in error["message"]


def test_completions_too_many_token_ids_in_all_sequences_is_refused(checkpoint):
    with serving(checkpoint, max_request_tokens=100) as api:
        body = {"prompt": [[1] * 10] * 2, "n": 4}
        error = error_of(api.post("/v1/completions", body | {"logit_bias": {"3": 1, "4": 1, "5": 1}}))
        assert "104 token ids" in error["message"] and "at most 100 (option `max_request_tokens`)" in error["message"]
        assert api.engine.sent == []
        assert api.post("/v1/completions", body).status_code == 200


def test_completions_too_many_logprobs_of_several_sequences_is_refused(checkpoint):
    with serving(checkpoint, max_request_logprobs=100) as api:
        body = {"prompt": [1, 2], "max_tokens": 10, "n": 2, "logprobs": 5}
        error = error_of(api.post("/v1/completions", body))
        assert "up to 120 log-probabilities" in error["message"] and "`max_request_logprobs`" in error["message"]
        assert error["param"] == "logprobs"
        error = error_of(api.post("/v1/completions", body | {"max_tokens": None, "logprobs": 0, "n": 20}))
        assert "up to 320 log-probabilities" in error["message"]  # 16 tokens, a completion's default
        assert api.post("/v1/completions", body | {"logprobs": 4}).status_code == 200


def test_completions_logprobs_of_one_sequence_are_not_limited(checkpoint):
    with serving(checkpoint, max_request_logprobs=1) as api:
        assert api.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 10, "logprobs": 5}).status_code == 200


def test_completions_sequences_with_a_token_make_room_for_others(checkpoint):
    with serving(checkpoint, max_queued_requests=2) as api:
        api.engine.script = None
        body = {"prompt": "hello", "n": 2, "stream": True}

        async def scenario():
            first = Call(api.app, "/v1/completions", body)
            await settle()
            refused = Call(api.app, "/v1/completions", body)
            await refused.task
            assert refused.received[0]["status"] == 429
            assert "2 sequences wait for their first token, this request has 2, and at most 2" in refused.text
            api.engine.deliver(Chunk(request_id=api.engine.requests[0].request_id, token_ids=[api.speech[0]]))
            await settle()
            second = Call(api.app, "/v1/completions", body)
            await settle()
            for request in api.engine.requests:
                api.engine.deliver(Chunk(request_id=request.request_id, finish_reason=FinishReason.LENGTH))
            await asyncio.wait_for(asyncio.gather(first.task, second.task), 5)
            return first, second

        first, second = api.run(scenario())
        assert [call.received[0]["status"] for call in (first, second)] == [200, 200]


def test_completions_refused_while_tokenizing_releases_its_reservation(checkpoint):
    with serving(checkpoint, max_queued_requests=2) as api:
        for _ in range(5):  # the second prompt is too long
            error_of(api.post("/v1/completions", {"prompt": [[1, 2], [1] * 64]}))
        assert api.post("/v1/completions", {"prompt": "hello", "n": 2}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_generation_when_metrics_fail_aborts_what_was_sent(api, path, monkeypatch):
    api.engine.script = None
    body = {
        "/v1/completions": {"prompt": "hello", "n": 3},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "n": 3},
        "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"n": 3}},
    }[path]

    async def scenario():
        call = Call(api.app, path, body)
        monkeypatch.setattr("eagleray.metrics.requests.RequestMetrics.begin", broken)
        await asyncio.wait_for(call.task, 5)
        return call

    def broken(*_, **__):
        raise OverflowError("a sum became infinite")

    call = api.run(scenario())
    assert call.received[0]["status"] == 500
    assert len(api.engine.requests) == 3
    assert sorted(api.engine.aborted) == sorted(request.request_id for request in api.engine.requests)
    assert api.client.num_in_flight == 0


def test_completions_huge_max_tokens_is_a_bad_request(api):
    body = b'{"prompt": "hello", "n": 200, "max_tokens": 1' + b"0" * 400 + b"}"
    error = error_of(api.request("POST", "/v1/completions", content=body))
    assert error["param"] == "max_tokens" and len(error["message"]) < 200
    assert api.engine.sent == []


def test_metrics_sum_of_max_tokens_stays_finite_and_exact(api):
    for _ in range(3):
        assert api.post("/v1/completions", {"prompt": "hello", "max_tokens": 2**62}).status_code == 200
    (line,) = [line for line in api.get("/metrics").text.splitlines() if "params_max_tokens_sum" in line]
    assert float(line.split()[-1]) == 3_000_000


def test_openapi_has_the_limits_of_lists(api):
    fields = api.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]
    assert {
        name: fields[name]["maxItems"] for name in ("stop", "bad_words", "stop_token_ids", "logprob_token_ids")
    } == {
        "stop": MAX_STOP_STRINGS,
        "bad_words": MAX_BAD_WORDS,
        "stop_token_ids": MAX_STOP_TOKEN_IDS,
        "logprob_token_ids": MAX_LOGPROB_TOKEN_IDS,
    }
    assert fields["logit_bias"]["maxProperties"] == MAX_LOGIT_BIASES


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_generating_routes_n_of_a_million_is_refused_before_allocation(api, path):
    body = {
        "/v1/completions": {"prompt": "hello", "n": 10**6},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "n": 10**6},
        "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"n": 10**6}},
    }[path]
    tracemalloc.start()
    try:
        error = error_of(api.post(path, body))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "1000000 sequences" in error["message"] and peak < 2**22


def test_chat_too_many_template_variables_are_refused(api):
    kwargs = {str(number): number for number in range(1000)}
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": kwargs}
    error = error_of(api.post("/v1/chat/completions", body))
    assert "at most 256 entries, but it has 1000" in error["message"] and error["param"] == "chat_template_kwargs"


def test_memory_return_after_a_large_body_collects_cycles_once(api, monkeypatch):
    monkeypatch.setattr(memory_return, "MEMORY_RETURN_SECONDS", 0.2)
    trims = []
    monkeypatch.setattr(memory_return, "malloc_trim", lambda: trims.append(True))

    class Node:
        pass

    async def scenario():
        node = Node()
        node.itself, gone = node, weakref.ref(node)
        del node
        for _ in range(3):
            call = Call(api.app, "/tokenize", {"prompt": "x" * 2**21})
            await asyncio.wait_for(call.task, 5)
        async with asyncio.timeout(5):
            while not trims:
                await asyncio.sleep(0.01)
        assert gone() is None and len(trims) == 1

    api.run(scenario())
