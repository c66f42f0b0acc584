"""Streamed answers as the load generator reads them."""

from __future__ import annotations

import json

import pytest

from eagleray_bench.events import EventSplitter, StreamedAnswer


def text(word: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": word, "finish_reason": finish_reason}], "usage": None})


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
COUNTS = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
USAGE = event({"choices": [], "usage": COUNTS})


def answer(*chunks: bytes) -> StreamedAnswer:
    """Read the chunks a second apart."""
    found = StreamedAnswer()
    for second, chunk in enumerate(chunks):
        found.feed(chunk, float(second))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_event_splitter_any_cut_of_the_stream_gives_the_same_events(size):
    stream = b': a comment\n\ndata: {"a"\r\ndata:: 1}\r\n\r\nid: 7\nevent: x\ndata:two\n\n\n\ndata: [DONE]\n\n'
    splitter = EventSplitter()
    found = [data for start in range(0, len(stream), size) for data in splitter.feed(stream[start : start + size])]
    assert found == [b'{"a"\n: 1}', b"two", b"[DONE]"]


def test_streamed_answer_complete_stream_has_times_and_counts():
    found = answer(text("a"), text("b", "length") + USAGE, DONE)
    assert found.failure is None
    assert found.token_times == [0.0, 1.0]
    assert (found.num_prompt_tokens, found.num_output_tokens, found.num_cached_tokens) == (5, 2, 4)


def test_streamed_answer_events_of_one_read_have_one_time():
    assert answer(text("") + text("b"), text("c", "stop"), DONE).token_times == [0.0, 0.0, 1.0]


def test_streamed_answer_chat_role_alone_is_no_token():
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
def test_streamed_answer_incomplete_stream_is_a_failure(chunks, cause):
    assert cause in answer(*chunks).failure


def test_streamed_answer_several_errors_reports_the_first():
    found = answer(event({"error": "first"}), event({"error": "second"}), text("a", "length"), DONE)
    assert "first" in found.failure
