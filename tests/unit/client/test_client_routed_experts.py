"""Routed experts of a request: valid options, and the rows that a reader gets."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from client_fakes import CLIENT, INFO, deliver, make_request
from client_tokenizers import load
from hypothesis import given
from hypothesis import strategies as st

from eagleray.client.preprocess import RequestBuilder
from eagleray.client.routed_experts import RoutedExpertsBuffer
from eagleray.errors import InvalidRequest
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import Chunk, FinishReason
from eagleray.messages.sampling import SamplingParams

TOKENIZER = load("byte_level")
BUILDER = RequestBuilder(CLIENT, tokenizer=None, eos_token_ids=(2,), max_logprobs=20)
ROUTING = RoutingInfo(num_layers=3, num_experts=256, top_k=2)
PROMPT = [5, 6, 7]


def rows(start, end, salt=0):
    """Return the rows of positions `start` to `end` - 1: [n, 3, 2]"""
    return np.array([[[position + salt, layer] for layer in range(3)] for position in range(start, end)], np.uint8)


def part(start, end, salt=0):
    return rows(start, end, salt).tobytes()


def state(*, routing=ROUTING, **params):
    params = {"return_routed_experts": True, **params}
    return make_request(prompt=PROMPT, tokenizer=TOKENIZER, routing=routing, **params)


def sent_again(request):
    """Return the message for the next engine."""
    request.on_engine_exit("killed")
    return request.next_messages()[0]


def chunk(*token_ids, **fields):
    return Chunk(request_id="", token_ids=list(token_ids), **fields)


def only(delta):
    (output,) = delta.outputs
    return output


# Options.


def asked(info=INFO, **params):
    made = BUILDER.make_messages(PROMPT, SamplingParams(**params), info, request_id="x", seed=1)
    return [request.routed_experts_from for request in made]


def test_make_messages_routed_experts_from_start_position():
    assert asked() == asked(return_routed_experts=False) == [None]
    assert asked(return_routed_experts=True) == [0]
    assert asked(return_routed_experts=True, routed_experts_prompt_start=3, n=2) == [3, 3]


@pytest.mark.parametrize("asks", [None, False])
def test_make_messages_start_without_routed_experts_raises(asks):
    with pytest.raises(InvalidRequest, match="add `return_routed_experts`") as refusal:
        asked(return_routed_experts=asks, routed_experts_prompt_start=1)
    assert refusal.value.param == "routed_experts_prompt_start"


@pytest.mark.parametrize(
    ("info", "params", "param", "message"),
    [
        ({"has_experts": False, "routing": None}, {}, "return_routed_experts", r"the model \(Tiny\) has no experts"),
        ({"routing": None}, {}, "return_routed_experts", "the option `enable_return_routed_experts`"),
        ({}, {"routed_experts_prompt_start": 4}, "routed_experts_prompt_start", "is 4, but the prompt has 3 tokens"),
    ],
)
def test_make_messages_unavailable_routed_experts_raise(info, params, param, message):
    with pytest.raises(InvalidRequest, match=message) as refusal:
        asked(msgspec.structs.replace(INFO, **info), return_routed_experts=True, **params)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("routed_experts_prompt_start", -1),
        ("routed_experts_prompt_start", 1.5),
        ("routed_experts_prompt_start", True),
        ("return_routed_experts", "yes"),
        ("return_routed_experts", 1),
    ],
)
def test_sampling_params_invalid_routed_experts_option_raises(name, value):
    with pytest.raises(InvalidRequest, match=f"`{name}` must be"):
        SamplingParams(**{name: value})


# Output.


def test_pop_delta_has_new_rows_and_output_all():
    request = state()
    deliver(request, 0, chunk(routed_experts=part(0, 2)))
    delta = only(request.pop_delta())
    assert (delta.token_ids, delta.text, delta.routed_experts_start) == ([], "", 0)
    assert np.array_equal(delta.routed_experts, rows(0, 2))
    assert request.pop_delta() is None
    deliver(request, 0, chunk(40, routed_experts=part(2, 3)))
    deliver(request, 0, chunk(41, routed_experts=part(3, 4)))
    delta = only(request.pop_delta())
    assert (delta.token_ids, delta.routed_experts_start) == ([40, 41], 2)
    assert np.array_equal(delta.routed_experts, rows(2, 4))
    deliver(request, 0, chunk(42, routed_experts=part(4, 5), finish_reason=FinishReason.LENGTH))
    delta = only(request.pop_delta())
    assert (delta.token_ids, delta.routed_experts_start) == ([42], 4)
    (output,) = request.output().outputs
    assert np.array_equal(output.routed_experts, rows(0, 5))
    assert (output.routed_experts.dtype, output.routed_experts_start) == (np.uint8, 0)


def test_deliver_after_restart_keeps_known_rows():
    request = state()
    assert request.next_messages()[0].routed_experts_from == 0
    deliver(request, 0, chunk(routed_experts=part(0, 2)))
    assert sent_again(request).routed_experts_from == 2
    deliver(request, 0, chunk(40, routed_experts=part(2, 3, salt=100)))
    (output,) = request.output().outputs
    assert np.array_equal(output.routed_experts, np.concatenate([rows(0, 2), rows(2, 3, salt=100)]))


def test_deliver_missing_row_at_end_raises():
    request = state()
    with pytest.raises(AssertionError, match="bytes of routed experts, not 18"):
        deliver(request, 0, chunk(40, routed_experts=part(0, 2), finish_reason=FinishReason.LENGTH))


def test_deliver_stop_string_truncates_rows():
    hello, world = (TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("hello", " world"))
    request = state(stop=TOKENIZER.token_to_text(world)[:2])
    deliver(request, 0, chunk(hello, routed_experts=part(0, 3)))
    assert len(only(request.pop_delta()).routed_experts) == 3
    deliver(request, 0, chunk(world, hello, hello, routed_experts=part(3, 6)))
    assert request.is_finished
    (output,) = request.output().outputs
    assert output.token_ids == [hello, world]
    assert np.array_equal(output.routed_experts, rows(0, 4))
    assert np.array_equal(only(request.pop_delta()).routed_experts, rows(3, 4))


def test_abort_keeps_known_rows():
    request = state(routed_experts_prompt_start=1)
    assert request.output().outputs[0].routed_experts.shape == (0, 3, 2)
    deliver(request, 0, chunk(routed_experts=part(1, 2)))
    request.abort()
    delta = only(request.pop_delta())
    assert (delta.finish_reason, delta.routed_experts_start) == ("abort", 1)
    (output,) = request.output().outputs
    assert np.array_equal(output.routed_experts, rows(1, 2))


def test_output_each_completion_has_own_rows():
    request = state(n=2)
    deliver(request, 1, chunk(40, routed_experts=part(0, 3, salt=9)))
    deliver(request, 0, chunk(routed_experts=part(0, 1)))
    first, second = request.output().outputs
    assert np.array_equal(first.routed_experts, rows(0, 1))
    assert np.array_equal(second.routed_experts, rows(0, 3, salt=9))


def test_output_without_routed_experts_has_none():
    for request in (state(return_routed_experts=None), state(return_routed_experts=False), state(routing=None)):
        request.next_messages()
        deliver(request, 0, chunk(40, routed_experts=part(0, 3)))
        assert only(request.pop_delta()).routed_experts is None
        assert request.output().outputs[0].routed_experts is None
        assert sent_again(request).routed_experts_from is None


@pytest.mark.parametrize(("num_experts", "dtype"), [(2, np.uint8), (256, np.uint8), (257, np.uint16), (512, np.uint16)])
def test_buffer_dtype_is_smallest_for_num_experts(num_experts, dtype):
    kept = RoutedExpertsBuffer(
        RoutingInfo(num_layers=1, num_experts=num_experts, top_k=1), start=0, num_prompt_tokens=1
    )
    assert kept.all().dtype == dtype
    kept.append(np.array([[[num_experts - 1]]], dtype).tobytes())
    assert kept.all().tolist() == [[[num_experts - 1]]]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30), st.integers(0, 4))
def test_pop_new_parts_of_any_size_join_to_all(parts, start):
    """`parts`: number of new rows, and whether they are read at once."""
    kept = RoutedExpertsBuffer(ROUTING, start=start, num_prompt_tokens=4)
    read = []
    for num_new, is_read in parts:
        kept.append(part(kept.end, kept.end + num_new))
        if is_read and (new_rows := kept.pop_new()) is not None:
            first, new = new_rows
            assert first == start + sum(map(len, read))
            read.append(new)
    assert np.array_equal(kept.all(), rows(start, kept.end).reshape(-1, 3, 2))
    if (new_rows := kept.pop_new()) is not None:
        read.append(new_rows[1])
    assert np.array_equal(np.concatenate([kept.all()[:0], *read]), kept.all())
    assert kept.pop_new() is None
