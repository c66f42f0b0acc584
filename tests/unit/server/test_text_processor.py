"""Long texts, conversations and bodies: refused at once where they cannot fit, and no other request waits for them."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from server_fakes import Call, serving, settle, write_checkpoint

from eagleray.client.text.tokenizer import Tokenizer

LONGEST = 14
"""Characters of the longest token of the test's tokenizer, `<|endoftext|>` with one to spare."""


def error_of(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.fixture
def tokenized(monkeypatch):
    """The lengths of all texts that are tokenized."""
    lengths = []
    encode, count = Tokenizer.encode, Tokenizer.count_tokens

    def recording_encode(self, text, **options):
        lengths.append(len(text))
        return encode(self, text, **options)

    def recording_count(self, text):
        lengths.append(len(text))
        return count(self, text)

    monkeypatch.setattr(Tokenizer, "encode", recording_encode)
    monkeypatch.setattr(Tokenizer, "count_tokens", recording_count)
    return lengths


@pytest.mark.parametrize("stream", [False, True])
def test_completions_text_that_cannot_fit_is_not_tokenized(api, tokenized, stream):
    text = "x" * (64 * LONGEST)
    error = error_of(api.post("/v1/completions", {"prompt": text, "stream": stream}))
    assert "maximum context length is 64 tokens, prompt and output together" in error["message"]
    assert f"The prompt is too long: {len(text)} characters cannot be" in error["message"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert tokenized == []


def test_chat_conversation_that_cannot_fit_is_not_rendered(api, tokenized):
    error = error_of(api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 65}))
    assert "too long: 65 messages have" in error["message"] and error["param"] == "messages"
    error = error_of(api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1000}]}))
    assert "too long: 1000 characters cannot be" in error["message"] and error["param"] == "messages"
    assert tokenized == []


def test_completions_text_with_too_many_tokens_is_tokenized_in_part(api, tokenized):
    api.join(max_model_len=50_000)
    text = "a b c d " * 60_000
    error = error_of(api.post("/v1/completions", {"prompt": text}))
    assert "the first 65536 of its 480000 characters have about" in error["message"]
    assert tokenized == [65536]


def test_tokenize_takes_more_than_the_models_length_but_not_everything(api):
    text = "hello " * 10_000
    assert api.post("/tokenize", {"prompt": text}).json()["count"] > 1000
    error = error_of(api.post("/tokenize", {"prompt": "x" * 3_000_000}))
    assert "at most 131072 tokens are taken at a time" in error["message"]
    error = error_of(api.post("/detokenize", {"tokens": [1] * 140_000}))
    assert "at most 131072 are taken at a time" in error["message"]


def test_completions_while_a_long_text_is_tokenized_others_are_answered(api, monkeypatch):
    api.join(max_model_len=50_000)
    may_go_on = threading.Event()
    count = Tokenizer.count_tokens

    def slow_count(self, text):
        assert may_go_on.wait(10)
        return count(self, text)

    monkeypatch.setattr(Tokenizer, "count_tokens", slow_count)

    async def scenario():
        slow = Call(api.app, "/v1/completions", {"prompt": "hello " * 20_000})
        quick = Call(api.app, "/v1/completions", {"prompt": "hello"})
        await asyncio.wait_for(quick.task, 5)
        assert quick.received[0]["status"] == 200 and not slow.task.done()
        may_go_on.set()
        await asyncio.wait_for(slow.task, 10)
        assert slow.received[0]["status"] == 200

    api.run(scenario())


def test_completions_when_the_client_leaves_tokenizing_ends(api, monkeypatch):
    api.join(max_model_len=5_000_000)
    begun, num_pieces = threading.Event(), 0

    def endless_count(self, text):
        nonlocal num_pieces
        num_pieces += 1
        begun.set()
        time.sleep(0.01)
        return 1

    monkeypatch.setattr(Tokenizer, "count_tokens", endless_count)

    async def scenario():
        call = Call(api.app, "/v1/completions", {"prompt": "hello " * 2_000_000})
        await asyncio.to_thread(begun.wait, 10)
        call.leave()
        await asyncio.wait_for(call.task, 5)
        assert call.received == []

    api.run(scenario())
    assert num_pieces < 100  # of 184
    assert api.engine.sent == []


def test_completions_panic_of_the_tokenizer_is_a_bad_request(api, monkeypatch):
    class PanicException(BaseException):
        """A panic as the tokenizer's library raises it."""

    class Backend:
        def encode(self, *_, **__):
            raise PanicException("retry-limit-in-match over")

    monkeypatch.setattr(api.client.tokenizer, "_backend", Backend())
    monkeypatch.setitem(api.client.tokenizer.__dict__, "max_token_chars", LONGEST)
    error = error_of(api.post("/v1/completions", {"prompt": "    "}))
    assert "the tokenizer fails on this text of 4 characters (retry-limit-in-match over)" in error["message"]


ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
ENDLESS_TEXT = "{% for a in range(100000) %}{% for b in range(100000) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [(ENDLESS, "it was still running after 0.2 s"), (ENDLESS_TEXT, "it wrote more than 832 characters")],
)
def test_chat_template_without_end_is_given_up(tmp_path, template, reason):
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / "chat_template.jinja").write_text(template)
    with serving(checkpoint, chat_template_timeout=0.2) as api:
        error = error_of(api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}))
        assert f"the chat template was given up: {reason}" in error["message"]
        assert "`chat_template_timeout`" in error["message"] and error["param"] == "messages"
        assert api.post("/v1/completions", {"prompt": "hello"}).status_code == 200


def test_chat_when_the_client_leaves_the_template_ends(tmp_path):
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / "chat_template.jinja").write_text(ENDLESS)
    with serving(checkpoint, chat_template_timeout=1000) as api:

        async def scenario():
            call = Call(api.app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
            await settle()
            call.leave()
            await asyncio.wait_for(call.task, 5)
            # The thread is free again: it takes the next conversation, which ends in the same way.
            other = Call(api.app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
            await settle()
            other.leave()
            await asyncio.wait_for(other.task, 5)

        api.run(scenario())


def test_body_with_more_values_than_tokens_is_not_decoded(api):
    for body, what in (
        (b'{"prompt": [' + b"1," * 2_200_000 + b"1]}", "2200000 commas"),
        (b'{"prompt": [' + b"[]," * 600_000 + b"[]]}", "600003 brackets and braces"),
    ):
        error = error_of(api.request("POST", "/v1/completions", content=body))
        assert f"the body has {what}" in error["message"] and "`max_request_tokens`" in error["message"]
