"""/inference/v1/generate: token ids in and out."""

from __future__ import annotations

import pytest
from server_fakes import Chunk as EngineChunk
from server_fakes import FinishReason, serving

PATH = "/inference/v1/generate"


def generate(api, token_ids=(5, 6, 7), **fields):
    body = {"token_ids": [*token_ids], "sampling_params": {}, **fields}
    response = api.post(PATH, body, headers={"X-Request-Id": "mine"})
    assert response.status_code == 200, response.text
    return response.json()


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}


def test_generate_whole_answer_has_token_ids(api):
    answer = generate(api, sampling_params={"max_tokens": 2})
    choice = {"index": 0, "token_ids": api.speech[:2], "logprobs": None, "finish_reason": "length", "stop_reason": None}
    choice["weight_versions"] = [{"version": "default", "start": 0, "end": 2}]
    assert answer == {"request_id": "mine", "choices": [choice], "prompt_logprobs": None, "usage": USAGE}
    assert api.engine.requests[-1].prompt_token_ids == [5, 6, 7]
    assert generate(api, request_id="other")["request_id"] == "other"


def test_generate_stream_events_join_to_the_answer(api):
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}, "stream_options": {"include_usage": True}}
    events = api.events(PATH, {**body, "request_id": "mine"})
    head = {"request_id": "mine", "prompt_logprobs": None}
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
    top = {"token": f"token_id:{first + 1}", "logprob": -1.0, "bytes": None}
    chosen = {"token": f"token_id:{first}", "logprob": -1.5, "bytes": None, "top_logprobs": [top]}
    assert answer["choices"][0]["logprobs"] == {"content": [chosen], "refusal": None}
    assert [position and list(position) for position in answer["prompt_logprobs"]] == [None, ["6", "7"], ["7", "8"]]
    (event,) = api.events(PATH, {"token_ids": [5, 6, 7], "sampling_params": params})
    assert event["choices"] == answer["choices"]
    assert event["prompt_logprobs"] == answer["prompt_logprobs"]


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
        for path, body in [
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/completions", {"prompt": [5, 6]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
            ("/tokenize", {"prompt": "hello"}),
            ("/detokenize", {"tokens": [5]}),
        ]:
            response = api.post(path, body)
            assert response.status_code == 400, path
            assert "skip_tokenizer_init" in response.json()["error"]["message"]
        assert len(api.engine.requests) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [320]}, "token_ids"),
        ({"token_ids": ["5"]}, "token_ids[0]"),
        ({"token_ids": [5] * 64}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"sampling_params": {"n": "2"}}, "sampling_params.n"),
        ({"sampling_params": {"stop_token_ids": [999]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"best_of": 2}}, "sampling_params.best_of"),
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
