"""Slow readers and large answers: other tasks run meanwhile, and nothing is lost."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from server_fakes import Call, logprobs_of, parse_events, serving, settle

from eagleray.messages.outputs import Chunk, FinishReason
from eagleray.server.logprobs import EncodedList

PATHS = {
    "/v1/completions": {"prompt": "hello", "logprobs": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 5},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"logprobs": 5}},
}


def with_n(body, n):
    if "sampling_params" in body:
        return body | {"sampling_params": body["sampling_params"] | {"n": n, "max_tokens": 900}}
    return body | {"n": n, "max_tokens": 900}


def speak_at_once(api, count):
    """An application whose engine sends all tokens of a completion in one chunk."""
    for request in api.engine.requests:
        api.engine.deliver(
            Chunk(
                request_id=request.request_id,
                token_ids=api.speech[:1] * count,
                logprobs=[logprobs_of(api.speech[0], 5)] * count,
                finish_reason=FinishReason.LENGTH,
            )
        )


async def count_turns(work):
    """Return the number of turns that another task gets until `work` is done."""
    turns = 0
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


@pytest.fixture
def wide(checkpoint):
    with serving(checkpoint) as api:
        api.join(max_model_len=1000)
        api.engine.script = None
        yield api


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_large_answer_with_logprobs_lets_other_tasks_run(wide, path, stream):
    api, count, n = wide, 900, 3

    async def scenario():
        call = Call(api.app, path, with_n(PATHS[path], n) | {"stream": stream})
        await settle()
        speak_at_once(api, count)
        turns = await asyncio.wait_for(count_turns(call.task), 30)
        return call, turns

    call, turns = api.run(scenario())
    assert turns >= n * count * 6 / 1024 - 1  # a thousand tokens and log-probabilities at a time
    answers = parse_events(call.text) if stream else [json.loads(call.text)]
    totals = [0] * n
    for choice in (choice for answer in answers for choice in answer["choices"]):
        logprobs = choice["logprobs"]
        if logprobs is not None:
            entries = logprobs["content"] if "content" in logprobs else logprobs["token_logprobs"]
            totals[choice["index"]] += len(entries)
    assert totals == [count] * n


@pytest.mark.parametrize("path", PATHS)
def test_large_stream_equals_the_whole_answer(wide, path):
    api = wide

    async def scenario(stream):
        call = Call(api.app, path, with_n(PATHS[path], 2) | {"stream": stream})
        await settle()
        api.engine.sent = [request for request in api.engine.requests if request.request_id not in seen]
        seen.update(request.request_id for request in api.engine.requests)
        speak_at_once(api, 500)
        await asyncio.wait_for(call.task, 30)
        return call

    seen = set()
    whole = json.loads(api.run(scenario(False)).text)["choices"]
    events = [event["choices"][0] for event in parse_events(api.run(scenario(True)).text)]
    assert len(events) > 4
    for expected in whole:
        parts = [event for event in events if event["index"] == expected["index"]]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [expected["finish_reason"]]
        logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        for name, values in expected["logprobs"].items():
            if isinstance(values, list):
                assert [value for part in logprobs for value in part[name]] == values
        if "text" in expected:
            assert "".join(part["text"] for part in parts) == expected["text"]


def test_generate_large_answer_as_msgpack_equals_json(wide):
    api, path = wide, "/inference/v1/generate"

    async def scenario(headers):
        call = Call(api.app, path, with_n(PATHS[path], 1))
        call.task.cancel()
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        received = []

        async def send(message):
            received.append(message)

        incoming = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": json.dumps(with_n(PATHS[path], 1)).encode()})
        api.engine.sent.clear()
        task = asyncio.create_task(api.app(scope, incoming.get, send))
        await settle()
        speak_at_once(api, 900)
        await asyncio.wait_for(task, 30)
        return b"".join(message.get("body", b"") for message in received)

    as_json = json.loads(api.run(scenario([])))
    as_msgpack = msgspec.msgpack.decode(api.run(scenario([(b"accept", b"application/msgpack")])))
    assert as_msgpack["choices"] == as_json["choices"]
    assert len(as_json["choices"][0]["logprobs"]["content"]) == 900


def test_large_answer_when_the_client_leaves_is_not_formatted(wide, monkeypatch):
    api, formatted = wide, 0

    def count(*arguments, **options):
        nonlocal formatted
        formatted += 1
        return original(*arguments, **options)

    from eagleray.server.openai import chat

    original = chat.chat_logprobs
    monkeypatch.setattr(chat, "chat_logprobs", count)
    path = "/v1/chat/completions"

    async def scenario():
        call = Call(api.app, path, with_n(PATHS[path], 8))
        await settle()
        speak_at_once(api, 900)
        while formatted == 0:
            await asyncio.sleep(0)
        call.leave()
        await asyncio.wait_for(call.task, 5)
        return call

    call = api.run(scenario())
    assert call.received == []
    assert formatted < 8 * 900 * 6 / 1024  # not all of it


def test_stream_when_the_reader_stops_is_not_formatted(wide, monkeypatch):
    api, formatted = wide, 0
    from eagleray.server.openai import chat

    original = chat.chat_logprobs

    def count(*arguments, **options):
        nonlocal formatted
        formatted += 1
        return original(*arguments, **options)

    monkeypatch.setattr(chat, "chat_logprobs", count)
    path = "/v1/chat/completions"

    async def scenario():
        call = Call(api.app, path, with_n(PATHS[path], 4) | {"stream": True})
        call.may_send.clear()
        await settle()
        speak_at_once(api, 900)
        for _ in range(200):
            await asyncio.sleep(0)
        before = formatted
        call.may_send.set()
        await asyncio.wait_for(call.task, 30)
        return before

    assert api.run(scenario()) <= 4  # one delta, of at most four completions
    assert formatted >= 4 * 900 * 6 / 1024


@pytest.mark.parametrize("is_msgpack", [False, True])
@pytest.mark.parametrize("sizes", [[], [0], [1], [15, 1], [16], [3, 0, 70_000]])
def test_encoded_list_equals_the_list(sizes, is_msgpack):
    encoded, items = EncodedList(is_msgpack=is_msgpack), []
    for size in sizes:
        part = [{"place": len(items) + place} for place in range(size)]
        encoded.extend(part)
        items += part
    codec = msgspec.msgpack if is_msgpack else msgspec.json
    assert codec.decode(codec.encode({"a": encoded.pop(), "b": 1})) == {"a": items, "b": 1}
