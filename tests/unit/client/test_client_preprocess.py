from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from client_fakes import CLIENT, INFO
from client_tokenizers import load

from eagleray.client.preprocess import MAX_COMPLETIONS, Prompt, RequestBuilder
from eagleray.client.prompt_scores import PromptScores
from eagleray.errors import InvalidRequest, PromptTooLong
from eagleray.messages.outputs import Chunk, FinishReason, PromptLogprobs
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, SamplingParams, Stopping

BUILDER = RequestBuilder(CLIENT, tokenizer=load("byte_level"), eos_token_ids=(2, 7, 10**6), max_logprobs=20)
WITHOUT_TOKENIZER = RequestBuilder(CLIENT, tokenizer=None, eos_token_ids=(2,), max_logprobs=20)


def requests(params, token_ids=(5, 6, 7), *, seed=3, builder=BUILDER, **options):
    made = builder.make_messages(list(token_ids), params, INFO, request_id="x", seed=seed, **options)
    for request in made:  # the engine must be able to decode it
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Generate) == request
    return made


def request(params, **options):
    (made,) = requests(params, **options)
    return made


def test_make_messages_default_params_give_default_message():
    assert request(SamplingParams()) == Generate(
        request_id="x",
        client=CLIENT,
        prompt_token_ids=[5, 6, 7],
        sampling=Sampling(seed=3),
        stopping=Stopping(max_tokens=16, eos_token_ids=(2, 7)),
    )


def test_make_messages_every_param_is_in_message():
    params = SamplingParams(
        temperature=1,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={np.int64(5): np.float64(-100), 6: 2},
        allowed_token_ids=[5, 6, 6],
        stop_token_ids=[9, 9, 7],
        min_tokens=2,
        max_tokens=10,
        logprobs=3,
        logprob_token_ids=[8, 8, 1],
        prompt_logprobs=0,
    )
    made = request(params, priority=-4, cache_salt="salt")
    assert made.sampling == Sampling(
        seed=3,
        temperature=1.0,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias={5: -100.0, 6: 2.0},
        allowed_token_ids=(5, 6),
        min_tokens=2,
        suppressed_token_ids=(2, 7, 9),
        logprobs=3,
        logprob_token_ids=(8, 1),
        prompt_logprobs=0,
    )
    assert made.stopping == Stopping(max_tokens=10, min_tokens=2, eos_token_ids=(2, 7), stop_token_ids=(9, 7))
    assert (made.priority, made.cache_salt) == (-4, "salt")


def test_make_messages_top_k_of_all_tokens_becomes_no_limit():
    assert request(SamplingParams(top_k=-1)).sampling.top_k == 0
    assert request(SamplingParams(top_k=10**18)).sampling.top_k == INFO.vocab_size


def test_make_messages_ignore_eos_keeps_stop_tokens():
    made = request(SamplingParams(ignore_eos=True, stop_token_ids=[9], min_tokens=1))
    assert made.stopping.eos_token_ids == ()
    assert made.sampling.suppressed_token_ids == made.stopping.stop_token_ids == (9,)


def test_make_messages_logprob_token_ids_alone_report_chosen_token_too():
    assert request(SamplingParams(logprob_token_ids=[1])).sampling.logprobs == 0


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 61), (10**18, 61), (61, 61), (60, 60)])
def test_make_messages_max_tokens_is_limited_by_model_length(max_tokens, expected):
    assert request(SamplingParams(max_tokens=max_tokens)).stopping.max_tokens == expected


def test_make_messages_min_tokens_is_limited_by_model_length():
    assert request(SamplingParams(max_tokens=None, min_tokens=10**18)).sampling.min_tokens == INFO.max_model_len


def test_make_messages_several_completions_differ_in_id_and_seed():
    params = SamplingParams(n=3, prompt_logprobs=1)
    made = requests(params)
    assert [child.request_id for child in made] == ["x/0", "x/1", "x/2"]
    assert len({child.sampling.seed for child in made} | {3}) == 4
    assert [child.sampling.prompt_logprobs for child in made] == [1, None, None]
    assert made == requests(params)
    assert made != requests(params, seed=4)


def test_make_messages_bad_words_are_tokenized_with_and_without_space():
    encode = BUILDER.tokenizer.encode
    found = request(SamplingParams(bad_words=["hello", " again", " "])).sampling.bad_words
    texts = ["hello", " hello", "again", " again", " "]
    assert set(found) == {tuple(encode(text, add_special_tokens=False)) for text in texts}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt("hello"), BUILDER.tokenizer.encode("hello", add_special_tokens=True)),
        (Prompt(token_ids=[5, 6]), [5, 6]),
        (Prompt("shown", [5, 6]), [5, 6]),
        (Prompt(token_ids=np.array([5, 6])), [5, 6]),
    ],
)
def test_tokenize_text_or_ids_returns_plain_integers(prompt, expected):
    found = BUILDER.tokenize(prompt, INFO)
    assert found == expected
    assert all(type(token_id) is int for token_id in found)


def test_tokenize_text_adds_special_tokens():
    tokenizer = load("byte_fallback")
    builder = RequestBuilder(CLIENT, tokenizer=tokenizer, eos_token_ids=(), max_logprobs=0)
    assert builder.tokenize(Prompt(""), INFO) == [1]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt(), "needs a text or token ids"),
        (Prompt(""), "empty"),
        (Prompt(token_ids=[]), "empty"),
        (Prompt(token_ids=[1, -1]), "token id -1 is out of range; the model has the ids 0 to 499"),
        (Prompt(token_ids=[1, 500]), "token id 500 is out of range"),
        (Prompt(token_ids=[10**30]), "out of range"),
        (Prompt(token_ids=[1.5]), "must be integers"),
        (Prompt(token_ids=5), "must be integers"),
        (Prompt("\ud800"), "surrogate"),
    ],
)
def test_tokenize_invalid_prompt_raises(prompt, expected):
    with pytest.raises(InvalidRequest, match=expected) as raised:
        BUILDER.tokenize(prompt, INFO)
    assert raised.value.param == "prompt"


def test_tokenize_prompt_of_model_length_raises():
    assert len(BUILDER.tokenize(Prompt(token_ids=[5] * 63), INFO)) == 63
    with pytest.raises(
        PromptTooLong, match=r"context length is 64 tokens.*it has 64 tokens; shorten it to at most 63\.$"
    ):
        BUILDER.tokenize(Prompt(token_ids=[5] * 64), INFO)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logit_bias": {500: 1.0}}, "token id 500"),
        ({"logit_bias": {"5": 1.0}}, "must be integers"),
        ({"allowed_token_ids": [-1]}, "token id -1"),
        ({"stop_token_ids": [500]}, "token id 500"),
        ({"logprob_token_ids": [500]}, "token id 500"),
        ({"logprob_token_ids": list(range(129))}, "at most 128 ids, but it has 129"),
        ({"logprobs": 21}, "at most 20 .*max_logprobs.* it is 21"),
        ({"prompt_logprobs": 21}, "at most 20"),
        ({"n": MAX_COMPLETIONS + 1}, "at most 1024"),
        ({"bad_words": ["\ud800"]}, "surrogate"),
    ],
)
def test_make_messages_param_beyond_model_or_server_raises(fields, expected):
    with pytest.raises(InvalidRequest, match=expected) as raised:
        requests(SamplingParams(**fields))
    assert raised.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"priority": 2**63}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"priority": math.inf}, "priority"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
    ],
)
def test_make_messages_value_that_no_message_can_hold_raises(options, param):
    with pytest.raises(InvalidRequest) as raised:
        requests(SamplingParams(), **options)
    assert raised.value.param == param


def test_make_messages_derived_types_become_plain():
    class Number(int):
        pass

    (message,) = requests(SamplingParams(max_tokens=Number(9)), priority=True, cache_salt=np.str_("salt"))
    assert (message.stopping.max_tokens, message.priority, message.cache_salt) == (9, 1, "salt")
    assert [type(value) for value in (message.stopping.max_tokens, message.priority, message.cache_salt)] == [
        int,
        int,
        str,
    ]


def test_request_builder_without_tokenizer_accepts_only_token_ids():
    assert WITHOUT_TOKENIZER.tokenize(Prompt("shown", [5]), INFO) == [5]
    assert request(SamplingParams(), builder=WITHOUT_TOKENIZER).stopping.eos_token_ids == (2,)
    with pytest.raises(InvalidRequest, match=r"a text prompt needs the tokenizer.*skip_tokenizer_init.*token ids"):
        WITHOUT_TOKENIZER.tokenize(Prompt("text"), INFO)
    for fields in ({"stop": "x"}, {"bad_words": ["x"]}):
        with pytest.raises(InvalidRequest, match="skip_tokenizer_init"):
            requests(SamplingParams(**fields), builder=WITHOUT_TOKENIZER)


def build(params, token_ids=(5, 6, 7)):
    options = {"ids_in_use": (), "request_id": "x", "priority": 0, "cache_salt": "", "timeout": None, "session": None}
    made = BUILDER.build(Prompt(token_ids=list(token_ids)), params, INFO, rank=None, **options)
    return made.completions[0].message


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 3), (2, 2), (99, 3)])
def test_build_given_tokens_end_the_request_alone(max_tokens, expected):
    params = SamplingParams(
        trace_decode_token_ids=[9, 2, 9], max_tokens=max_tokens, min_tokens=0, stop="a", stop_token_ids=[9]
    )
    message = build(params)
    assert message.sampling.forced_token_ids == (9, 2, 9)
    assert message.stopping == Stopping(max_tokens=expected)
    assert params.stop == "a"  # the caller's parameters are as before


def test_build_given_tokens_are_limited_by_model_length():
    room = INFO.max_model_len - 3
    assert len(build(SamplingParams(trace_decode_token_ids=[1] * 10**5)).sampling.forced_token_ids) == room


@pytest.mark.parametrize("given", [[INFO.vocab_size], [-1], [1.5], ["a"], 7])
def test_build_given_tokens_that_are_no_ids_are_refused(given):
    with pytest.raises(InvalidRequest, match="trace_decode_token_ids"):
        build(SamplingParams(trace_decode_token_ids=given))


def test_sampling_params_given_tokens_with_several_completions_are_refused():
    with pytest.raises(InvalidRequest, match="trace_decode_token_ids"):
        SamplingParams(trace_decode_token_ids=[1], n=2)


def test_build_scored_ids_have_a_row_for_every_position():
    message = build(SamplingParams(prompt_logprob_token_ids=np.array([[4, -1]]), prompt_logprob_start=1, n=1))
    assert message.sampling.prompt_logprob_token_ids == ((0, 0), (4, 0))
    assert message.sampling.prompt_logprobs == 0


def test_make_messages_of_several_completions_score_the_prompt_once():
    params = SamplingParams(prompt_logprob_token_ids=[[4], [5]], n=2)
    scores = PromptScores.of(params, num_prompt_tokens=3, vocab_size=INFO.vocab_size, max_ids=20)
    first, second = requests(params, scores=scores)
    assert first.sampling.prompt_logprob_token_ids == ((4,), (5,))
    assert (second.sampling.prompt_logprob_token_ids, second.sampling.prompt_logprobs) == ((), None)


def test_given_tokens_and_scored_ids_go_to_the_next_engine_too():
    params = SamplingParams(trace_decode_token_ids=[9, 8, 7], prompt_logprob_token_ids=[[4], [5]])
    options = {"ids_in_use": (), "request_id": "x", "priority": 0, "cache_salt": "", "timeout": None, "session": None}
    request = BUILDER.build(Prompt(token_ids=[5, 6, 7]), params, INFO, rank=None, **options)
    (first,) = request.next_messages()
    numbers = PromptLogprobs(1, np.zeros((1, 2), np.int32), np.array([[-1, -2]], np.float32), np.ones(1, np.int32))
    request.deliver(request.completions[0], Chunk(request_id="", token_ids=[9], prompt_logprobs=numbers))
    (second,) = request.next_messages()
    assert second.sampling == first.sampling
    assert (second.output_token_ids, second.prompt_logprobs_from) == ([9], 2)
    numbers = PromptLogprobs(2, np.zeros((1, 2), np.int32), np.array([[-3, -4]], np.float32), np.ones(1, np.int32))
    last = Chunk(request_id="", token_ids=[8, 7], prompt_logprobs=numbers, finish_reason=FinishReason.LENGTH)
    request.deliver(request.completions[0], last)
    output = request.output()
    assert output.outputs[0].token_ids == [9, 8, 7]
    assert output.prompt_token_id_logprobs.tolist() == [[-2], [-4]]
    assert output.prompt_logprobs is None
