"""Ends of repetitive completions, and streams that collect several tokens."""

from __future__ import annotations

import random

import pytest
from client_fakes import deliver, make_request

from eagleray.client.repetition import RepetitionDetector
from eagleray.errors import InvalidRequest
from eagleray.messages.outputs import Chunk, FinishReason
from eagleray.messages.sampling import MAX_PATTERN_SIZE, RepetitionDetectionParams, SamplingParams


def is_repetitive(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """Whether the tokens end with `min_count` copies of a pattern, by comparing the copies."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        tail = tokens[-size * params.min_count :]
        if len(tail) == size * params.min_count and tail == tail[:size] * params.min_count:
            return True
    return False


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 3), (5, 5), (0, 2)])
@pytest.mark.parametrize("min_count", [2, 3])
def test_detector_finds_what_comparing_copies_finds(sizes, min_count):
    rng = random.Random(min_count)
    params = RepetitionDetectionParams(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=min_count)
    num_found = 0
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(30)]
        found = RepetitionDetector(params, min_tokens=3).push(tokens)
        ends = (end for end in range(3, len(tokens) + 1) if is_repetitive(tokens[:end], params))
        assert found == next(ends, None)
        num_found += found is not None
    assert num_found > 0


DETECTION = RepetitionDetectionParams(max_pattern_size=2, min_count=3)


def chunk(*token_ids, finish_reason=None):
    return Chunk(request_id="", token_ids=list(token_ids), finish_reason=finish_reason)


def test_completion_that_repeats_ends_at_that_token():
    request = make_request(repetition_detection=DETECTION, logprobs=None)
    deliver(request, 0, chunk(9, 5, 6))
    deliver(request, 0, chunk(5, 6, 5, 6, 7, 8))
    (output,) = request.output().outputs
    assert output.token_ids == [9, 5, 6, 5, 6, 5, 6]
    assert (output.finish_reason, output.stop_reason) == ("repetition", "repetition_detected")
    assert request.pop_delta().finished


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_completion_that_ends_with_the_repetition_keeps_its_reason(reason):
    request = make_request(repetition_detection=DETECTION)
    deliver(request, 0, chunk(4, 4, 4, finish_reason=reason))
    (output,) = request.output().outputs
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([4, 4, 4], reason, None)


def test_completion_with_detection_off_may_repeat():
    request = make_request(repetition_detection=RepetitionDetectionParams())
    deliver(request, 0, chunk(4, 4, 4, 4))
    assert request.output().outputs[0].finish_reason is None


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_pattern_size": MAX_PATTERN_SIZE + 1, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 2, "min_count": 10**9}, "min_count"),
        ({"max_pattern_size": 2, "min_count": "3"}, "min_count"),
        ({"size": 2}, ""),
    ],
)
def test_repetition_detection_of_wrong_values_is_refused(fields, name):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(repetition_detection=fields)
    assert refused.value.param == f"repetition_detection.{name}".rstrip(".")


def test_pop_delta_with_an_interval_collects_tokens():
    request = make_request(stream_interval=3)
    deliver(request, 0, chunk(1))
    assert request.pop_delta().outputs[0].token_ids == [1]  # the first at once
    for token in (2, 3):
        deliver(request, 0, chunk(token))
        assert request.pop_delta() is None
    deliver(request, 0, chunk(4))
    assert request.pop_delta().outputs[0].token_ids == [2, 3, 4]
    deliver(request, 0, chunk(5))
    assert request.pop_delta() is None
    deliver(request, 0, chunk(finish_reason=FinishReason.LENGTH))
    delta = request.pop_delta()
    assert (delta.outputs[0].token_ids, delta.finished) == ([5], True)


def test_output_with_an_interval_is_complete_at_any_time():
    request = make_request(stream_interval=9)
    for token in (1, 2, 3):
        deliver(request, 0, chunk(token))
        request.pop_delta()
    assert request.output().outputs[0].token_ids == [1, 2, 3]
