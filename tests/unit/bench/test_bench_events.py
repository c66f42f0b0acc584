"""Streamed answers as the load generator reads them."""

from __future__ import annotations

import json

import pytest

from eagleray_bench.events import Answer, EventSplitter


def text(word: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": word, "finish_reason": finish_reason}], "usage": None})


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
COUNTS = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
USAGE = event({"choices": [], "usage": COUNTS})


def answer(*chunks: bytes) -> Answer:
    """Read one after the other, a second apart."""
    found = Answer()
    for second, chunk in enumerate(chunks):
        found.feed(chunk, float(second))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_wherever_reads_cut_them(size):
    stream = b': a comment\n\ndata: {"a"\r\ndata:: 1}\r\n\r\nid: 7\nevent: x\ndata:two\n\n\n\ndata: [DONE]\n\n'
    splitter = EventSplitter()
    found = [data for start in range(0, len(stream), size) for data in splitter.feed(stream[start : start + size])]
    assert found == [b'{"a"\n: 1}', b"two", b"[DONE]"]


def test_a_complete_answer():
    found = answer(text("a"), text("b", "length") + USAGE, DONE)
    assert found.failure is None
    assert found.token_times == [0.0, 1.0]
    assert (found.num_prompt_tokens, found.num_output_tokens, found.num_cached_tokens) == (5, 2, 4)


def test_events_of_one_read_have_one_time_and_tokens_without_text_count():
    assert answer(text("") + text("b"), text("c", "stop"), DONE).token_times == [0.0, 0.0, 1.0]


def test_a_chat_begins_with_its_first_words_not_with_the_role():
    def chat(delta: dict, finish_reason: str | None = None) -> bytes:
        return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})

    chunks = [chat({"role": "assistant", "content": ""}), chat({"reasoning_content": "hm"}), chat({"content": "yes"})]
    found = answer(*chunks, chat({}, "stop"), DONE)
    assert found.failure is None
    assert found.token_times == [1.0, 2.0]


@pytest.mark.parametrize(
    ("chunks", "cause"),
    [
        ([text("a"), event({"error": {"message": "the engine ended", "code": 500}}), DONE], "the engine ended"),
        ([event({"error": "out of memory"}), DONE], "out of memory"),
        ([text("a", "length")], "the stream ended before its end was announced"),
        ([text("a"), DONE], "finish reason None"),
        ([text("a", "abort"), DONE], "finish reason 'abort'"),
        ([b"data: {not json}\n\n", DONE], "an event that cannot be read"),
        ([b'data: {"choices": [{"text": 1}]}\n\n', DONE], "an event that cannot be read"),
        ([b'data: "a string"\n\n', DONE], "an event that cannot be read"),
        ([event({"choices": [{"index": 0, "finish_reason": "stop"}]}), DONE], "no tokens"),
        ([DONE], "finish reason None"),
        ([], "before its end was announced"),
    ],
)
def test_what_is_no_complete_answer_is_a_failure(chunks, cause):
    assert cause in answer(*chunks).failure


def test_the_first_failure_is_the_one_that_is_told():
    found = answer(event({"error": "first"}), event({"error": "second"}), text("a", "length"), DONE)
    assert "first" in found.failure
