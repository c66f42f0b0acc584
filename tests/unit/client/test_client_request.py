"""The output of a request, as fast and slow readers get it."""

from __future__ import annotations

import numpy as np
import pytest
from client_fakes import deliver, make_request
from client_tokenizers import load

from eagleray.client.outputs import Logprob
from eagleray.client.request import MAX_DELTA_ENTRIES
from eagleray.errors import InvalidRequest, RequestFailed
from eagleray.messages.outputs import Chunk, FinishReason, PromptLogprobs, TokenLogprobs
from eagleray.messages.sampling import RepetitionDetectionParams

TOKENIZER = load("byte_level")
HELLO, WORLD = (TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("hello", " world"))
HE = TOKENIZER.token_to_text(HELLO)
WO = TOKENIZER.token_to_text(WORLD)


def state(*, tokenizer=TOKENIZER, **options):
    return make_request(tokenizer=tokenizer, **options)


def chunk(*token_ids, **fields):
    return Chunk(request_id="", token_ids=list(token_ids), **fields)


def only(delta):
    (output,) = delta.outputs
    return output


def test_pop_delta_after_several_chunks_returns_all():
    request = state()
    assert request.pop_delta() is None
    deliver(request, 0, chunk(HELLO, num_cached_tokens=2))
    deliver(request, 0, chunk(WORLD))
    delta = request.pop_delta()
    assert (only(delta).text, only(delta).token_ids) == (HE + WO, [HELLO, WORLD])
    assert (delta.finished, delta.num_cached_tokens, only(delta).finish_reason) == (False, 2, None)
    assert request.pop_delta() is None
    deliver(request, 0, chunk(HELLO, finish_reason=FinishReason.LENGTH))
    delta = request.pop_delta()
    assert (only(delta).text, only(delta).token_ids, only(delta).finish_reason) == (HE, [HELLO], "length")
    assert delta.finished
    assert request.pop_delta() is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop": WO[:3]},
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=2)},
        {"stream_interval": 3},
    ],
)
def test_append_token_equals_chunk_with_that_token(options):
    by_chunk, by_token = state(**options), state(**options)
    for token_id in (HELLO, WORLD, HELLO, WORLD, HELLO):
        deliver(by_chunk, 0, chunk(token_id))
        by_token.completions[0].append(token_id)
        assert by_token.pop_delta() == by_chunk.pop_delta()
        if by_chunk.is_finished:
            break
    assert by_token.output() == by_chunk.output()
    assert by_chunk.is_finished == any(name in options for name in ("stop", "repetition_detection"))


def test_output_after_reading_is_whole():
    request = state()
    deliver(request, 0, chunk(HELLO))
    request.pop_delta()
    deliver(request, 0, chunk(WORLD, finish_reason=FinishReason.LENGTH))
    output = request.output()
    assert output == request.output()
    assert (output.outputs[0].text, output.outputs[0].token_ids) == (HE + WO, [HELLO, WORLD])
    assert (output.finished, output.prompt, output.prompt_token_ids) == (True, None, [5, 6, 7])
    assert only(request.pop_delta()).text == WO


@pytest.mark.parametrize("stop", [None, "no such text"])
def test_output_stop_token_has_no_text(stop):
    for stop_token_id in (None, WORLD):
        request = state(skip_special_tokens=False, stop=stop)
        deliver(request, 0, chunk(HELLO, WORLD, finish_reason=FinishReason.STOP, stop_token_id=stop_token_id))
        (output,) = request.output().outputs
        assert (output.text, output.token_ids) == (HE, [HELLO, WORLD])
        assert (output.finish_reason, output.stop_reason) == ("stop", stop_token_id)
    request = state(include_stop_str_in_output=True)
    deliver(request, 0, chunk(HELLO, WORLD, finish_reason=FinishReason.STOP, stop_token_id=WORLD))
    assert request.output().outputs[0].text == HE + WO


@pytest.mark.parametrize("is_read_between", [False, True])
def test_output_that_stops_without_a_token_has_the_text_of_all(is_read_between):
    request = state()
    deliver(request, 0, chunk(HELLO, WORLD))
    if is_read_between:
        request.pop_delta()
    deliver(request, 0, chunk(finish_reason=FinishReason.STOP))
    assert request.output().outputs[0].text == HE + WO


def test_deliver_stop_string_truncates_tokens_logprobs_and_text():
    request = state(stop=[WO[:2]], logprobs=0)
    logprobs = [TokenLogprobs([token_id], [-1.0], 1) for token_id in (HELLO, WORLD, HELLO)]
    deliver(request, 0, chunk(HELLO, WORLD, HELLO, logprobs=logprobs))
    assert request.is_finished
    (output,) = request.output().outputs
    assert (output.text, output.token_ids, len(output.logprobs)) == (HE, [HELLO, WORLD], 2)
    assert (output.finish_reason, output.stop_reason, output.cumulative_logprob) == ("stop", WO[:2], -2.0)
    assert only(request.pop_delta()).stop_reason == WO[:2]


def test_pop_delta_incomplete_character_is_flushed_at_end():
    first_byte = next(index for index in range(256) if TOKENIZER.token_bytes(index) == b"\xe2")
    request = state()
    deliver(request, 0, chunk(HELLO, first_byte))
    assert only(request.pop_delta()).text == HE
    deliver(request, 0, chunk(first_byte, finish_reason=FinishReason.LENGTH))
    assert only(request.pop_delta()).text == "\ufffd\ufffd"


def test_pop_delta_logprobs_are_mappings_by_token_id():
    request = state(logprobs=2, logprob_token_ids=[WORLD, 9])
    reported = TokenLogprobs([HELLO, WORLD, HELLO, WORLD, 9], [-2.0, -0.5, -2.0, -0.5, -7.0], 2)
    deliver(request, 0, chunk(HELLO, logprobs=[reported]))
    (position,) = only(request.pop_delta()).logprobs
    assert position == {
        HELLO: Logprob(-2.0, 2, HE),
        WORLD: Logprob(-0.5, 1, WO),
        9: Logprob(-7.0, None, TOKENIZER.token_to_text(9)),
    }
    assert next(iter(position)) == HELLO
    deliver(request, 0, chunk(WORLD, logprobs=[TokenLogprobs([WORLD, WORLD, 9, WORLD, 9], [-1.0] * 5, 1)]))
    assert len(only(request.pop_delta()).logprobs) == 1
    assert request.output().outputs[0].cumulative_logprob == -3.0


def test_request_without_options_has_no_logprobs_and_no_text():
    request = state(detokenize=False)
    deliver(request, 0, chunk(HELLO))
    delta = only(request.pop_delta())
    assert (delta.text, delta.token_ids, delta.logprobs) == ("", [HELLO], None)
    (output,) = request.output().outputs
    assert (output.text, output.logprobs, output.cumulative_logprob) == ("", None, None)
    assert request.output().prompt_logprobs is None
    for silent in (state(detokenize=False, logprobs=0), state(tokenizer=None, logprobs=0)):
        deliver(silent, 0, chunk(HELLO, logprobs=[TokenLogprobs([HELLO], [-1.0], 1)]))
        assert only(silent.pop_delta()).logprobs == [{HELLO: Logprob(-1.0, 1, None)}]


def prompt_part(start, token_ids, logprobs, ranks):
    return PromptLogprobs(
        start=start,
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        ranks=np.array(ranks, dtype=np.int32),
    )


def test_pop_delta_prompt_logprobs_come_once_when_complete():
    request = state(prompt=[5, HELLO, WORLD], prompt_logprobs=1)
    deliver(request, 0, chunk(prompt_logprobs=prompt_part(1, [[HELLO, 9]], [[-2.0, -1.0]], [3])))
    assert request.pop_delta() is None
    assert request.output().prompt_logprobs is None
    deliver(request, 0, chunk(prompt_logprobs=prompt_part(2, [[WORLD, WORLD]], [[-0.5, -0.5]], [1])))
    delta = request.pop_delta()
    expected = [None, {HELLO: Logprob(-2.0, 3, HE), 9: Logprob(-1.0, 1, TOKENIZER.token_to_text(9))}]
    expected.append({WORLD: Logprob(-0.5, 1, WO)})
    assert (delta.prompt_logprobs, delta.outputs, delta.finished) == (expected, [], False)
    deliver(request, 0, chunk(HELLO, finish_reason=FinishReason.LENGTH))
    assert request.pop_delta().prompt_logprobs is None
    assert request.output().prompt_logprobs == expected


def test_pop_delta_prompt_logprobs_of_single_token_are_complete():
    assert state(prompt=[5], prompt_logprobs=1).pop_delta().prompt_logprobs == [None]


def test_pop_delta_completions_progress_independently():
    request = state(n=2)
    deliver(request, 1, chunk(HELLO, num_cached_tokens=3))
    delta = request.pop_delta()
    assert (only(delta).index, delta.num_cached_tokens) == (1, 0)
    deliver(request, 1, chunk(WORLD, finish_reason=FinishReason.LENGTH))
    deliver(request, 0, chunk(HELLO, num_cached_tokens=2))
    delta = request.pop_delta()
    assert [(output.index, output.finish_reason) for output in delta.outputs] == [(0, None), (1, "length")]
    assert (delta.finished, delta.num_cached_tokens) == (False, 2)
    request.abort()
    assert [output.finish_reason for output in request.output().outputs] == ["abort", "length"]
    assert (only(request.pop_delta()).finish_reason, request.is_finished) == ("abort", True)


def test_deliver_error_keeps_earlier_output():
    request = state()
    deliver(request, 0, chunk(HELLO))
    deliver(request, 0, chunk(finish_reason=FinishReason.ERROR, error="it broke"))
    assert isinstance(request.failure, RequestFailed)
    assert str(request.failure) == "it broke"
    assert only(request.pop_delta()).text == HE


def test_deliver_user_error_becomes_invalid_request():
    request = state()
    deliver(request, 0, chunk(finish_reason=FinishReason.ERROR, error="no token is left", is_user_error=True))
    assert isinstance(request.failure, InvalidRequest)
    assert str(request.failure) == "no token is left"


def test_pop_delta_backlog_comes_in_bounded_deltas():
    request = state(n=3, temperature=1, logprobs=1)
    entry = TokenLogprobs([HELLO, WORLD], [-1.0, -2.0], 1)
    for index in range(3):
        deliver(request, index, chunk(*[HELLO] * 1000, logprobs=[entry] * 1000, finish_reason=FinishReason.LENGTH))
    deltas = []
    while delta := request.pop_delta():
        deltas.append(delta)
        assert 0 < sum(len(output.token_ids) for output in delta.outputs) <= MAX_DELTA_ENTRIES // 2
        assert request.has_more == (not delta.finished)
    assert len(deltas) == 6 and deltas[-1].finished
    for index, whole in enumerate(request.output().outputs):
        parts = [output for delta in deltas for output in delta.outputs if output.index == index]
        assert "".join(part.text for part in parts) == whole.text == HE * 1000
        assert [token_id for part in parts for token_id in part.token_ids] == whole.token_ids
        assert [position for part in parts for position in part.logprobs] == whole.logprobs
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        for part in parts:
            assert part.text == HE * len(part.token_ids)


def test_pop_delta_left_out_completion_comes_first_next_time():
    request = state(n=2, temperature=1)
    for index in range(2):
        deliver(request, index, chunk(*[HELLO] * 2000))
    first, second = request.pop_delta(), request.pop_delta()
    assert ([output.index for output in first.outputs], [output.index for output in second.outputs]) == ([0], [1])


def test_pop_delta_stop_string_in_backlog_comes_in_last_delta():
    request = state(stop=[WO[1:]], max_tokens=5000)
    deliver(request, 0, chunk(*[HELLO] * 3000))
    deliver(request, 0, chunk(WORLD, HELLO))
    parts = []
    while delta := request.pop_delta():
        parts += delta.outputs
    assert "".join(part.text for part in parts) == HE * 3000 + WO[:1] == request.output().outputs[0].text
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert parts[-1].stop_reason == WO[1:]
