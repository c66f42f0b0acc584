from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eagleray.identity import ClientId, EngineId
from eagleray.messages import wires
from eagleray.messages.codec import Codec
from eagleray.messages.lifecycle import Attach
from eagleray.messages.membership import EngineInfo, Joined
from eagleray.messages.outputs import Chunk, Chunks, FinishReason, PromptLogprobs, TokenLogprobs
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping

ENGINE = EngineId("i", 0, 2)


def over_the_wire(kind, message):
    frames = [bytes(frame) for frame in Codec(kind).encode(message)]
    return Codec(kind).decode(frames)


def test_codec_message_round_trip_is_equal():
    info = EngineInfo(architecture="A", vocab_size=5, max_model_len=6, block_size=7, num_kv_blocks=8)
    generate = Generate(
        request_id="r",
        client=ClientId("i", 0),
        prompt_token_ids=[1, 2],
        sampling=Sampling(seed=3, logit_bias={4: 0.5}, bad_words=((1, 2), (3,))),
        stopping=Stopping(max_tokens=4, eos_token_ids=(1,)),
    )
    chunk = Chunk(
        request_id="r",
        token_ids=[1],
        logprobs=[TokenLogprobs([1, 2], [-0.1, -0.2], 1)],
        finish_reason=FinishReason.STOP,
    )
    for kind, message in (
        (wires.ENGINE_INBOX, generate),
        (wires.ENGINE_INBOX, Attach(ENGINE, "ipc://x", [Joined(ENGINE, "y", info), Joined(ClientId("i", 0), "z")])),
        (wires.CLIENT_INBOX, Chunks(ENGINE, [chunk])),
    ):
        assert over_the_wire(kind, message) == message


@given(hnp.arrays(st.sampled_from([np.int32, np.float32]), hnp.array_shapes(max_dims=3, max_side=40)))
def test_codec_array_round_trip_is_equal(array):
    logprobs = PromptLogprobs(start=1, token_ids=array, logprobs=array.T, ranks=array[:1])
    chunks = Chunks(ENGINE, [Chunk(request_id="a", prompt_logprobs=logprobs)])
    received = over_the_wire(wires.CLIENT_INBOX, chunks).chunks[0].prompt_logprobs
    for sent, got in ((array, received.token_ids), (array.T, received.logprobs), (array[:1], received.ranks)):
        assert got.dtype == sent.dtype
        assert np.array_equal(got, sent, equal_nan=got.dtype.kind == "f")


def test_codec_large_array_has_its_own_frame():
    large = np.zeros((5000, 2), np.int32)
    logprobs = PromptLogprobs(start=1, token_ids=large, logprobs=large[:2], ranks=large[:2])
    frames = Codec(wires.CLIENT_INBOX).encode(Chunks(ENGINE, [Chunk(request_id="a", prompt_logprobs=logprobs)]))
    assert [len(frame) for frame in frames[1:]] == [large.nbytes]


def test_codec_foreign_message_is_refused():
    with pytest.raises(msgspec.ValidationError):
        over_the_wire(wires.ENGINE_INBOX, Chunks(ENGINE, []))
    with pytest.raises(TypeError, match="a complex cannot be part of a message"):
        Codec(wires.ENGINE_INBOX).encode(1j)


def test_wires_every_message_is_decoded():
    assert len({wire.name for wire in wires.WIRES}) == len(wires.WIRES)
    for wire in wires.WIRES:
        Codec(wire.messages)
