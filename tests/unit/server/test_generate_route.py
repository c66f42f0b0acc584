"""/inference/v1/generate: token ids in and out."""

from __future__ import annotations

import base64
import io
import math
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
from server_fakes import Chunk as EngineChunk
from server_fakes import FinishReason, serving

from eagleray.messages.outputs import PromptLogprobs, TokenLogprobs

PATH = "/inference/v1/generate"


def generate(api, token_ids=(5, 6, 7), **fields):
    body = {"token_ids": [*token_ids], "sampling_params": {}, **fields}
    response = api.post(PATH, body, headers={"X-Request-Id": "mine"})
    assert response.status_code == 200, response.text
    return response.json()


USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": None,
    "completion_tokens_details": None,
}


HEAD = {"request_id": "mine", "model": "tiny", "output_mode": "tokens", "kv_transfer_params": None}


def test_generate_whole_answer_has_token_ids(api):
    answer = generate(api, sampling_params={"max_tokens": 2})
    choice = {"index": 0, "token_ids": api.speech[:2], "logprobs": None, "finish_reason": "length", "stop_reason": None}
    choice |= {"routed_experts": None, "sampling_mask": None}
    choice["weight_versions"] = [{"version": "default", "start": 0, "end": 2}]
    assert answer.pop("created") > 10**9
    absent = {"prompt_token_ids", "prompt_token_id_logprobs", "mm_placeholders", "metrics", "ec_transfer_params"}
    head = HEAD | dict.fromkeys(absent)
    assert answer == head | {"choices": [choice], "prompt_logprobs": None, "usage": USAGE}
    assert api.engine.requests[-1].prompt_token_ids == [5, 6, 7]
    assert generate(api, request_id="other")["request_id"] == "other"


def test_generate_stream_events_join_to_the_answer(api):
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}, "stream_options": {"include_usage": True}}
    events = api.events(PATH, {**body, "request_id": "mine"})
    assert all(event.pop("created") > 10**9 for event in events)
    head = HEAD | {"prompt_logprobs": None}
    choice = {"index": 0, "logprobs": None, "stop_reason": None}
    first, second = api.speech[:2]
    versions = [{"version": "default", "start": 0, "end": 2}]
    last = choice | {"token_ids": [second], "finish_reason": "length", "weight_versions": versions}
    assert events == [
        head | {"choices": [choice | {"token_ids": [first], "finish_reason": None}], "usage": None},
        head | {"choices": [last], "usage": None},
        head | {"choices": [], "usage": USAGE},
    ]


def test_generate_logprobs_name_tokens_by_id(api):
    params = {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}
    answer = generate(api, sampling_params=params)
    first = api.speech[0]
    chosen = {"token_id": first, "logprob": -1.5, "rank": 2}
    top = [chosen, {"token_id": first + 1, "logprob": -1.0, "rank": 1}]
    assert answer["choices"][0]["logprobs"] == {"content": [{**chosen, "top_logprobs": top}]}
    assert [position and list(position) for position in answer["prompt_logprobs"]] == [None, ["6", "7"], ["7", "8"]]
    (event,) = api.events(PATH, {"token_ids": [5, 6, 7], "sampling_params": params})
    assert answer["choices"] == [event["choices"][0] | {"routed_experts": None, "sampling_mask": None}]
    assert event["prompt_logprobs"] == answer["prompt_logprobs"]


def test_generate_logprobs_of_zero_report_the_sampled_token(api):
    (entry,) = generate(api, sampling_params={"max_tokens": 1, "logprobs": 0})["choices"][0]["logprobs"]["content"]
    chosen = {"token_id": api.speech[0], "logprob": -1.5, "rank": 2}
    assert entry == {**chosen, "top_logprobs": [chosen]}


def test_generate_dropped_tokens_have_a_finite_number(api):
    def script(message):
        reported = TokenLogprobs([8, 8, 9], [0.0, 0.0, -math.inf], 1)
        yield EngineChunk(
            request_id=message.request_id, token_ids=[8], logprobs=[reported], finish_reason=FinishReason.LENGTH
        )

    api.engine.script = script
    (entry,) = generate(api, sampling_params={"logprobs": 2})["choices"][0]["logprobs"]["content"]
    assert [(one["token_id"], one["logprob"]) for one in entry["top_logprobs"]] == [(8, 0.0), (9, -9999.0)]


class TokenLogprobModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    token_id: int
    logprob: float
    rank: int | None


class SampledLogprobModel(TokenLogprobModel):
    top_logprobs: list[TokenLogprobModel]


class LogprobsModel(pydantic.BaseModel):
    content: list[SampledLogprobModel] | None


class PromptLogprobModel(pydantic.BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str | None


class ChoiceModel(pydantic.BaseModel):
    index: int
    logprobs: LogprobsModel | None
    finish_reason: str | None
    token_ids: list[int]
    routed_experts: str | None = None


class UsageModel(pydantic.BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class GenerateModel(pydantic.BaseModel):
    """The fields that a client of vLLM reads of an answer, or of an event."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"]
    choices: list[ChoiceModel]
    usage: UsageModel | None = None
    prompt_logprobs: list[dict[int, PromptLogprobModel] | None] | None
    kv_transfer_params: dict[str, Any] | None


@pytest.mark.parametrize("num_logprobs", [None, 0, 3])
def test_generate_answers_parse_as_those_of_vllm(api, num_logprobs):
    params = {"max_tokens": 2, "n": 2, "temperature": 1.0} | ({} if num_logprobs is None else {"prompt_logprobs": 1})
    body = {"token_ids": [5, 6, 7], "sampling_params": params | {"logprobs": num_logprobs}}
    answer = GenerateModel.model_validate_json(api.post(PATH, body).content)
    streamed = [GenerateModel.model_validate(event) for event in api.events(PATH, body)]
    for index, choice in enumerate(answer.choices):
        parts = [part for event in streamed for part in event.choices if part.index == index]
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        if num_logprobs is None:
            assert choice.logprobs is None
        else:
            content = [entry for part in parts for entry in part.logprobs.content]
            assert content == choice.logprobs.content
            assert [entry.token_id for entry in content] == choice.token_ids
            assert all(entry.top_logprobs[0].token_id == entry.token_id for entry in content)
    assert (answer.prompt_logprobs is None) == (num_logprobs is None)


def test_generate_without_max_tokens_fills_the_models_length(api, checkpoint):
    generate(api, sampling_params={})
    (request,) = api.engine.requests
    assert request.stopping.max_tokens == api.client.engine_info.max_model_len - 3
    # the model's generation_config.json has other values
    assert (request.sampling.temperature, request.sampling.top_k) == (1.0, 0)


def test_generate_body_of_a_client_of_vllm_is_accepted(api):
    off = {
        "spaces_between_special_tokens": True,
        "output_kind": 2,
        "skip_clone": True,
        "flat_logprobs": True,
        "logprobs": 1,
    }
    off |= {"skip_reading_prefix_cache": True, "extra_args": {}, "structured_outputs": None, "stop": [], "seed": -1}
    off |= {"thinking_token_budget": None, "stream_interval": None, "repetition_detection": None, "max_tokens": 1}
    fields = {"features": None, "kv_transfer_params": None, "ec_transfer_params": {}, "output_mode": "tokens"}
    generate(api, sampling_params=off, **fields, assistant_tokens_mask=None, token_offsets=None)
    assert api.engine.requests[-1].skip_reading_prefix_cache


def test_generate_output_mode_text_names_tokens_by_text(api):
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 2, "logprobs": 2}, "output_mode": "text"}
    logprobs = generate(api, **body)["choices"][0]["logprobs"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 2}
    assert logprobs == api.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs["content"]] == ["hello", " world"]
    events = api.events(PATH, body)
    assert [one for event in events for one in event["choices"][0]["logprobs"]["content"]] == logprobs["content"]


def test_generate_output_mode_text_adds_the_text(api):
    body = {"sampling_params": {"max_tokens": 2}, "output_mode": "text"}
    answer = generate(api, **body)
    choice = answer["choices"][0]
    assert (answer["output_mode"], choice["text"], choice["token_ids"]) == ("text", "hello world", api.speech[:2])
    events = api.events(PATH, {"token_ids": [5], **body})
    assert "".join(event["choices"][0]["text"] for event in events) == "hello world"


# As vLLM 0.32 sends its own class: `GenerateRequest(...).model_dump(mode="json")`.
DUMPED = {
    "request_id": "b34c082e8b83fb71",
    "token_ids": [5, 6, 7],
    "token_offsets": None,
    "features": None,
    "content_parts": None,
    "sampling_params": {
        "stop": [],
        "stop_token_ids": [],
        "max_tokens": 2,
        "logprobs": 1,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
    },
    "model": "tiny",
    "reasoning_ended": None,
    "reasoning_parser_kwargs": None,
    "return_token_ids": None,
    "output_mode": "tokens",
    "stream": False,
    "stream_options": None,
    "cache_salt": None,
    "priority": 0,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"output_mode": "text", "return_token_ids": True},
        {"token_offsets": [[0, 1], [1, 2], [2, 3]], "reasoning_ended": True},
        {"sampling_params": {"output_kind": 2, "skip_clone": True, "flat_logprobs": False, "extra_args": {}}},
        {"sampling_params": {"output_text_buffer_length": 0, "prompt_logprob_token_ids": None, "detokenize": True}},
    ],
)
def test_generate_what_vllm_sends_is_accepted(api, fields):
    response = api.post(PATH, DUMPED | fields)
    assert response.status_code == 200, response.text
    assert "x-eagleray-ignored" not in response.headers
    assert response.json()["request_id"] == DUMPED["request_id"]


def test_generate_unknown_fields_are_ignored_and_named(api):
    body = {"token_ids": [5], "sampling_params": {"max_tokens": "2", "nobody": 1}, "tag": "x"}
    response = api.post(PATH, body)
    assert response.headers["x-eagleray-ignored"] == "sampling_params.nobody, tag"
    assert len(response.json()["choices"][0]["token_ids"]) == 2


def test_generate_return_token_ids_shows_the_prompt(api):
    assert generate(api, return_token_ids=True)["prompt_token_ids"] == [5, 6, 7]
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}, "return_token_ids": True}
    events = api.events(PATH, body)
    assert [event.get("prompt_token_ids") for event in events] == [[5, 6, 7], None]
    assert all(event["choices"][0]["token_ids"] for event in events)


def test_generate_given_tokens_reach_the_engine(api):
    generate(api, sampling_params={"trace_decode_token_ids": [8, 9, 8], "logprobs": 0, "stop_token_ids": [8]})
    message = api.engine.requests[-1]
    assert message.sampling.forced_token_ids == (8, 9, 8)
    assert (message.stopping.max_tokens, message.stopping.stop_token_ids) == (3, ())


def test_generate_scores_given_ids_at_positions_of_the_prompt(api):
    def script(message):
        width = 1 + (message.sampling.prompt_logprobs or 0) + len(message.sampling.prompt_logprob_token_ids[0])
        numbers = np.arange(3 * width, dtype=np.float32).reshape(3, width)
        prompt = PromptLogprobs(1, np.ones((3, width), np.int32), numbers, np.ones(3, np.int32))
        fields = {"token_ids": [8], "finish_reason": FinishReason.LENGTH}
        yield EngineChunk(request_id=message.request_id, prompt_logprobs=prompt, **fields)

    api.engine.script = script
    params = {"max_tokens": 1, "prompt_logprob_token_ids": [[7, 8], [9]], "prompt_logprob_start": 1}
    answer = generate(api, [5, 6, 7, 8], sampling_params=params)
    scores = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
    assert (scores.dtype, scores.tolist()) == (np.float32, [[4.0, 5.0], [7.0, -np.inf]])
    assert answer["prompt_logprobs"] is None
    sampling = api.engine.requests[-1].sampling
    assert (sampling.prompt_logprobs, sampling.prompt_logprob_token_ids) == (0, ((0, 0), (7, 8), (9, 0)))
    answer = generate(api, [5, 6, 7, 8], sampling_params=params | {"prompt_logprobs": 1})
    scores = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
    assert scores.tolist() == [[6.0, 7.0], [10.0, -np.inf]]
    assert len(answer["prompt_logprobs"]) == 4
    response = api.post(PATH, {"token_ids": [5, 6, 7, 8], "sampling_params": params, "stream": True})
    assert response.json()["error"]["param"] == "sampling_params.prompt_logprob_token_ids"


@pytest.mark.parametrize(
    "ids", [[[1]], [[1]] * 4, [[]] * 3, [[1], [2], [320]], [[1], [2], [-2]], [[1] * 21] * 3, [[1], [2], [10**30]]]
)
def test_generate_scores_of_a_wrong_shape_are_refused(api, ids):
    body = {"token_ids": [5, 6, 7, 8], "sampling_params": {"prompt_logprob_token_ids": ids}}
    error = api.post(PATH, body).json()["error"]
    assert error["param"] == "sampling_params.prompt_logprob_token_ids"
    assert not api.engine.requests


def test_generate_several_reasons_are_named_in_one_error(api):
    params = {"temperature": -1, "guided_json": {}}
    error = api.post(PATH, {"token_ids": [5], "sampling_params": params}).json()["error"]
    assert (error["param"], error["code"]) == ("sampling_params.guided_json", "unsupported_parameter")
    assert "`sampling_params.temperature`" in error["message"]


def test_generate_structured_outputs_as_vllm_writes_them_constrain_the_text(api):
    form = {"json": None, "regex": "a+", "disable_any_whitespace": False, "_backend": None, "_backend_was_auto": False}
    generate(api, sampling_params={"structured_outputs": form})
    grammar = api.engine.requests[-1].sampling.grammar
    assert (grammar.kind, grammar.source) == ("regex", "a+")


def test_generate_several_structured_outputs_are_refused_by_name(api):
    params = {"structured_outputs": {"regex": "a", "choice": ["b"]}}
    error = api.post(PATH, {"token_ids": [5], "sampling_params": params}).json()["error"]
    assert error["param"] == "sampling_params.structured_outputs"
    assert "regex and choice" in error["message"]


def test_generate_stop_string_ends_the_token_ids(api):
    choice = generate(api, sampling_params={"stop": [" world"]})["choices"][0]
    assert (choice["token_ids"], choice["stop_reason"]) == (api.speech[:2], " world")


def test_generate_several_completions_have_indices(api):
    answer = generate(api, sampling_params={"n": 3, "max_tokens": 1})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 3


def test_generate_without_a_tokenizer_works(checkpoint):
    with serving(checkpoint, skip_tokenizer_init=True) as api:
        api.engine.script = lambda request: iter(
            [EngineChunk(request_id=request.request_id, token_ids=[8, 9], finish_reason=FinishReason.LENGTH)]
        )
        assert generate(api, sampling_params={"max_tokens": 2})["choices"][0]["token_ids"] == [8, 9]
        text = api.post(PATH, {"token_ids": [5], "sampling_params": {}, "output_mode": "text"})
        assert (text.status_code, text.json()["error"]["param"]) == (400, "output_mode")
        for path, body in [
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/completions", {"prompt": [5, 6], "echo": True}),
            ("/v1/completions", {"prompt": [5, 6], "logprobs": 0}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
            ("/tokenize", {"prompt": "hello"}),
            ("/detokenize", {"tokens": [5]}),
        ]:
            response = api.post(path, body)
            assert response.status_code == 400, path
            assert "skip_tokenizer_init" in response.json()["error"]["message"]
        assert len(api.engine.requests) == 1
        (choice,) = api.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2}).json()["choices"]
        assert (choice["token_ids"], choice["text"], choice["prompt_token_ids"]) == ([8, 9], "", [5, 6])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"request_id": "x" * 257}, "request_id"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [320]}, "token_ids"),
        ({"token_ids": ["five"]}, "token_ids[0]"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [5] * 64}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"sampling_params": {"n": "two"}}, "sampling_params.n"),
        ({"sampling_params": {"prompt_logprob_token_ids": [[1, 2]]}}, "sampling_params.prompt_logprob_token_ids"),
        ({"sampling_params": {"prompt_logprob_start": -1}}, "sampling_params.prompt_logprob_start"),
        ({"sampling_params": {"trace_decode_token_ids": [320]}}, "sampling_params.trace_decode_token_ids"),
        ({"sampling_params": {"trace_decode_token_ids": [1], "n": 2}}, "sampling_params.n"),
        ({"sampling_params": {"guided_json": {}}}, "sampling_params.guided_json"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"sampling_params": {"stop_token_ids": [999]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"best_of": 2}}, "sampling_params.best_of"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args"),
        ({"sampling_params": {"detokenize": False}, "output_mode": "text"}, "output_mode"),
        ({"output_mode": "derender"}, "output_mode"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"priority": 1}, "priority"),
        ({"prompt": "hello"}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_generate_wrong_field_is_refused_by_name(api, fields, param, stream):
    response = api.post(PATH, {"token_ids": [5], "sampling_params": {}, "stream": stream, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not api.engine.requests


def test_generate_wrong_types_and_values_are_refused_together(api):
    params = {"temperature": "high", "max_tokens": 0, "grammar": "x"}
    message = api.post(PATH, {"token_ids": [5], "sampling_params": params}).json()["error"]["message"]
    names = [f"`sampling_params.{name}`" for name in ("grammar", "temperature", "max_tokens")]
    assert all(name in message for name in names), message


def of_new_weights(request):
    """Yield a token of the checkpoint's weights and one of the trainer's."""
    yield EngineChunk(request_id=request.request_id, token_ids=[8])
    last = {"weight_version": "step-1", "finish_reason": FinishReason.LENGTH}
    yield EngineChunk(request_id=request.request_id, token_ids=[9], **last)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"token_ids": [5], "sampling_params": {"max_tokens": 2}}),
        ("/v1/completions", {"prompt": [5], "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
    ],
)
def test_answers_have_weight_versions_after_an_update(api, path, body):
    """OpenAI's routes leave them out before; streams have them in the last event."""
    before = api.post(path, body).json()["choices"][0]
    assert ("weight_versions" in before) == (path == PATH)
    api.engine.script = of_new_weights
    versions = [{"version": "default", "start": 0, "end": 1}, {"version": "step-1", "start": 1, "end": 2}]
    assert api.post(path, body).json()["choices"][0]["weight_versions"] == versions
    events = [choice for event in api.events(path, body) for choice in event["choices"]]
    assert [event.get("weight_versions") for event in events] == [None] * (len(events) - 1) + [versions]
