"""/v1/completions, field by field."""

from __future__ import annotations

import json

import msgspec
import pytest
from server_fakes import FINGERPRINT, SPEECH, serving

from eagleray.messages.sampling import SamplingParams
from eagleray.server.field_fates import GENERATE_FATES
from eagleray.server.fields import SAMPLING_NAMES
from eagleray.server.generate import OWN_NAMES

PATH = "/v1/completions"


def ids(api, text):
    return api.client.tokenizer.encode(text, add_special_tokens=False)


def complete(api, **body):
    response = api.post(PATH, {"prompt": "hello", **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_completions_whole_answer_has_text_and_usage(api):
    answer = api.post(PATH, {"model": "alias", "prompt": "hello there"}, headers={"X-Request-Id": "mine"}).json()
    assert answer.pop("created") > 0
    assert answer == {
        "id": "cmpl-mine",
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": SPEECH,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                **dict.fromkeys(["prompt_logprobs", "prompt_token_ids", "token_ids", "routed_experts"]),
            }
        ],
        "system_fingerprint": FINGERPRINT,
        **dict.fromkeys(["service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"]),
        "usage": {
            "prompt_tokens": len(ids(api, "hello there")),
            "completion_tokens": len(api.speech) + 1,
            "total_tokens": len(ids(api, "hello there")) + len(api.speech) + 1,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }
    assert api.engine.requests[-1].prompt_token_ids == ids(api, "hello there")


def test_completions_stream_events_join_to_the_answer(api):
    events = api.events(PATH, {"prompt": "hello", "max_tokens": 2}, headers={"X-Request-Id": "mine"})
    created = events[0]["created"]
    head = {"id": "cmpl-mine", "object": "text_completion", "created": created, "model": "tiny"}
    choice = {"index": 0, "logprobs": None, "stop_reason": None, "prompt_token_ids": None, "token_ids": None}
    last = {"system_fingerprint": events[-1]["system_fingerprint"]}
    assert events == [
        head | {"choices": [choice | {"text": "hello", "finish_reason": None}]},
        head | last | {"choices": [choice | {"text": " world", "finish_reason": "length"}]},
    ]


def test_completions_stream_incomplete_characters_make_no_events(api):
    events = api.events(PATH, {"prompt": "hello"})
    texts = [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == SPEECH
    assert "😀" in texts
    assert len(events) < len(api.speech)
    assert all(texts[:-1])


def test_completions_stream_with_usage_ends_with_it(api):
    events = api.events(PATH, {"prompt": "hello", "max_tokens": 2, "stream_options": {"include_usage": True}})
    assert [event["usage"] for event in events[:-1]] == [None, None]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


@pytest.mark.parametrize("include_usage", [True, False])
def test_completions_continuous_usage_with_usage_is_in_every_event(api, include_usage):
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    events = api.events(PATH, {"prompt": "hello", "max_tokens": 2, "stream_options": options})
    shown = [event["usage"]["completion_tokens"] for event in events if "usage" in event]
    assert shown == ([1, 2, 2] if include_usage else [])


def test_completions_prompt_tokens_details_are_shown_by_option(checkpoint):
    with serving(checkpoint, enable_prompt_tokens_details=True) as api:
        assert complete(api)["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_completions_forced_usage_is_in_every_event(checkpoint):
    with serving(checkpoint, enable_force_include_usage=True) as api:
        events = api.events(PATH, {"prompt": "hello", "max_tokens": 2})
        assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 2]


def test_completions_several_prompts_and_n_have_ordered_indices(api):
    prompts = ["hello", "hello there", ids(api, "again")]
    body = {"prompt": prompts, "n": 2, "max_tokens": 2, "stream_options": {"include_usage": True}}
    answer = complete(api, prompt=prompts, n=2, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert {choice["text"] for choice in answer["choices"]} == {"hello world"}
    assert answer["usage"]["prompt_tokens"] == sum(len(ids(api, text)) for text in ("hello", "hello there", "again"))
    assert answer["usage"]["completion_tokens"] == 12
    assert [request.prompt_token_ids for request in api.engine.requests[::2]] == [
        ids(api, prompt) if isinstance(prompt, str) else prompt for prompt in prompts
    ]
    texts: dict[int, str] = {}
    *events, last = api.events(PATH, body)
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == dict.fromkeys(range(6), "hello world")
    assert last["usage"] == answer["usage"]


def test_completions_logprobs_have_offsets_and_alternatives(api):
    choice = complete(api, max_tokens=2, logprobs=2)["choices"][0]
    first, second = api.speech[:2]
    text_of = api.client.tokenizer.token_to_text
    assert choice["logprobs"] == {
        "text_offset": [0, 5],
        "token_logprobs": [-1.5, -1.5],
        "tokens": ["hello", " world"],
        "top_logprobs": [
            {text_of(first + 1): -1.0, "hello": -1.5},
            {text_of(second + 1): -1.0, " world": -1.5},
        ],
    }
    assert complete(api, max_tokens=1, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] == [{"hello": -1.5}]


def test_completions_logprobs_of_a_stream_equal_those_of_the_whole(api):
    body = {"prompt": "hello there", "logprobs": 2, "echo": True}
    whole = api.post(PATH, body).json()["choices"][0]["logprobs"]
    pieces = [event["choices"][0]["logprobs"] for event in api.events(PATH, body)]
    assert {key: [entry for piece in pieces for entry in piece[key]] for key in whole} == whole


def test_completions_echo_begins_with_the_prompt(api):
    choice = complete(api, prompt="hello there", max_tokens=1, echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == "hello therehello"
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value == -1.5 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"][-1] == len("hello there")
    assert complete(api, prompt=ids(api, "again"), max_tokens=1, echo=True)["choices"][0]["text"] == "againhello"
    first, second = api.events(PATH, {"prompt": "hello", "max_tokens": 2, "echo": True})
    assert (first["choices"][0]["text"], second["choices"][0]["text"]) == ("hellohello", " world")


def test_completions_echo_without_tokens_returns_the_prompt(api):
    answer = complete(api, prompt="hello there", max_tokens=0, echo=True, logprobs=1, return_token_ids=True)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("hello there", "length", [])
    assert "".join(choice["logprobs"]["tokens"]) == "hello there"
    assert answer["usage"]["completion_tokens"] == 0
    api.speech = []  # what would follow is the end
    (event,) = api.events(PATH, {"prompt": "hello there", "max_tokens": 0, "echo": True})
    assert event["choices"][0]["finish_reason"] == "length"
    assert event["choices"][0]["text"] == "hello there"


def test_completions_on_request_returns_token_ids_and_prompt_logprobs(api):
    body = {"prompt": "hello there", "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 1}
    prompt = ids(api, "hello there")
    choice = complete(api, **body)["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    assert choice["token_ids"] == api.speech[:2]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {
        str(prompt[1]): {
            "logprob": -1.5,
            "rank": 2,
            "decoded_token": api.client.tokenizer.token_to_text(prompt[1]),
        },
        str(prompt[1] + 1): {
            "logprob": -1.0,
            "rank": 1,
            "decoded_token": api.client.tokenizer.token_to_text(prompt[1] + 1),
        },
    }
    first, second = (event["choices"][0] for event in api.events(PATH, body))
    assert first["prompt_token_ids"] == prompt
    assert first["prompt_logprobs"] == choice["prompt_logprobs"]
    assert (first["token_ids"], second["token_ids"]) == (api.speech[:1], api.speech[1:2])
    assert second["prompt_token_ids"] is None
    assert "prompt_logprobs" not in second


def test_completions_sampling_fields_reach_the_engine(api):
    given = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 2.5},
        "allowed_token_ids": [5, 6],
        "bad_words": ["again"],
        "stop_token_ids": [9],
        "min_tokens": 1,
        "max_tokens": 3,
        "logprob_token_ids": [4],
        "priority": 7,
        "cache_salt": "salt",
        "user": "someone",
    }
    with serving(api.config.model.model, scheduling_policy="priority") as other:
        complete(other, **given)
        (request,) = other.engine.requests
    sampling = request.sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"):
        assert getattr(sampling, name) == given[name]
    assert sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == {5: 2.5}
    assert sampling.allowed_token_ids == (5, 6)
    assert sampling.bad_words
    assert sampling.logprob_token_ids == (4,)
    assert (request.stopping.min_tokens, request.stopping.max_tokens) == (1, 3)
    assert request.stopping.stop_token_ids == (9,)
    assert (request.priority, request.cache_salt) == (7, "salt")


def test_sampling_fields_are_those_of_sampling_params():
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    others = {name.removeprefix("sampling_params.") for name in GENERATE_FATES}
    assert {*SAMPLING_NAMES, *OWN_NAMES} == fields - others
    assert fields & others


def test_completions_defaults_are_the_models_then_openais(api, checkpoint):
    complete(api, temperature=None, n=None)
    (request,) = api.engine.requests
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 7)
    assert (request.sampling.top_p, request.stopping.max_tokens) == (1.0, 16)
    with serving(checkpoint, generation_config="none") as plain:
        complete(plain)
        assert plain.engine.requests[0].sampling.temperature == 1.0


def test_completions_stop_string_ends_the_text(api):
    choice = complete(api, stop=" world")["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", " world")
    choice = complete(api, stop=["nothing", " world"], include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "hello world"
    events = api.events(PATH, {"prompt": "hello", "stop": [" world"]})
    assert "".join(event["choices"][0]["text"] for event in events) == "hello"
    assert events[-1]["choices"][0]["stop_reason"] == " world"


def test_completions_token_ids_are_not_changed_by_add_special_tokens(api):
    for given in (True, False):
        body = {"prompt": [5, 6], "max_tokens": 1, "return_token_ids": True, "add_special_tokens": given}
        assert api.post(PATH, body).json()["choices"][0]["prompt_token_ids"] == [5, 6]


def test_completions_on_request_shows_special_tokens(api):
    api.speech = ids(api, "hello<|im_end|> world")
    assert complete(api)["choices"][0]["text"] == "hello world"
    assert complete(api, skip_special_tokens=False)["choices"][0]["text"] == "hello<|im_end|> world"


def test_completions_without_detokenize_returns_token_ids(api):
    choice = complete(api, detokenize=False, return_token_ids=True)["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", [*api.speech, api.eos])


def test_completions_long_text_is_tokenized_like_a_short_one(checkpoint):
    with serving(checkpoint) as api:
        api.join(max_model_len=100_000)
        text = "hello there and again " * 400
        answer = complete(api, prompt=text, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == len(ids(api, text))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "hello"]}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [-1], "echo": True}, "prompt"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": "hello", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "hello", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "hello", "n": 0}, "n"),
        ({"prompt": "hello", "n": 10**6}, "n"),
        ({"prompt": "hello", "temperature": -1}, "temperature"),
        ({"prompt": "hello", "top_p": 0}, "top_p"),
        ({"prompt": "hello", "logprobs": 21}, "logprobs"),
        ({"prompt": "hello", "seed": 2**70}, "seed"),
        ({"prompt": "hello", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "hello", "logit_bias": {"5": 101}}, "logit_bias"),
        ({"prompt": "hello", "stop": [""]}, "stop"),
        ({"prompt": "hello", "stop": [1]}, "stop[0]"),
        ({"prompt": "hello", "stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "hello", "priority": 1}, "priority"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_completions_wrong_field_is_refused_by_name(api, body, param, stream):
    response = api.post(PATH, {"stream": stream, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert (error["type"], error["code"]) == ("invalid_request_error", None)
    assert param.split("[")[0].split(".")[-1] in error["message"]
    assert not api.engine.requests or api.engine.aborted


def test_completions_fields_without_effect_leave_answer_and_prompt(api):
    nothing = ["suffix", "best_of", "metadata", "logit_bias", "store", "logprobs", "echo", "stop", "stream_options"]
    labels = {"metadata": {}, "user": "me", "safety_identifier": "me"}
    plain, plain_request = complete(api, seed=1), api.engine.requests[-1]
    for fields in (dict.fromkeys(nothing) | {"service_tier": "auto"}, labels | {"store": False, "priority": 0}):
        answer, request = complete(api, seed=1, **fields), api.engine.requests[-1]
        assert {**answer, "id": plain["id"], "created": plain["created"]} == plain
        assert (request.prompt_token_ids, request.sampling) == (plain_request.prompt_token_ids, plain_request.sampling)


def test_completions_too_long_prompt_has_an_error_code(api):
    error = api.post(PATH, {"prompt": [5] * 64}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "64" in error["message"]


def test_completions_one_wrong_prompt_of_several_sends_none(api):
    api.engine.script = None
    assert api.post(PATH, {"prompt": ["hello", [5] * 64]}).status_code == 400
    sent = {request.request_id for request in api.engine.requests}
    assert set(api.engine.aborted) == sent
    assert api.client.num_in_flight == 0


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", "3", '{"prompt": "x", "temperature": NaN}', '{"prompt": "\\ud800"}', '{"prompt": "x"} y'],
)
def test_completions_body_that_is_no_object_is_refused(api, body):
    response = api.request("POST", PATH, content=body)
    assert response.status_code == 400
    assert "body" in response.json()["error"]["message"]


def test_completions_body_that_is_not_utf8_is_refused(api):
    assert api.request("POST", PATH, content=b'{"prompt": "\xff"}').status_code == 400


def test_completions_infinite_number_is_refused(api):
    response = api.request("POST", PATH, content=json.dumps({"prompt": "x", "temperature": 1})[:-1] + "e999}")
    assert response.json()["error"]["param"] == "temperature"
