"""Routed experts over HTTP: the requests that get them, and their forms."""

from __future__ import annotations

import base64
import io
import itertools

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import ENGINE, Call, Chunk, FinishReason, serving, settle

from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import ExpertLoad

ROUTING = RoutingInfo(num_layers=3, num_experts=300, top_k=2)
GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
PROMPT = [5, 6, 7]
ASKS = {"return_routed_experts": True}


def rows(start, end):
    """Return the experts of positions `start` to `end` - 1, [end - start, 3, 2]."""
    values = [[[position + 256, layer] for layer in range(3)] for position in range(start, end)]
    return np.array(values, np.uint16).reshape(-1, 3, 2)


@pytest.fixture
def api(checkpoint):
    with serving(checkpoint, enable_return_routed_experts=True) as api:
        api.join(routing=ROUTING)
        api.engine.script = lambda request: speak(api, request)
        yield api


def speak(api, request):
    """Yield chunks: the prompt in two steps, then a token in each."""
    name, known = request.request_id, request.routed_experts_from
    num_prompt = len(request.prompt_token_ids)

    def computed(end):
        nonlocal known
        if known is None or known >= end:
            return b""
        start, known = known, end
        return rows(start, end).tobytes()

    if part := computed(num_prompt - 1):
        yield Chunk(request_id=name, routed_experts=part)
    last = request.stopping.max_tokens - 1
    for place in range(last + 1):
        reason = FinishReason.LENGTH if place == last else None
        part = computed(num_prompt + place)
        yield Chunk(request_id=name, token_ids=[api.speech[place]], routed_experts=part, finish_reason=reason)


def body(path, *, top=None, **params):
    """Return a body that asks for three tokens. `top`: fields that are not sampling parameters."""
    params = {"max_tokens": 3, **params}
    if path == GENERATE:
        return {"token_ids": PROMPT, "sampling_params": params, **(top or {})}
    prompt = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    return prompt | params | (top or {})


def choice(api, path, **fields):
    response = api.post(path, body(path, **fields))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def num_prompt(api):
    return len(api.engine.requests[-1].prompt_token_ids)


def npy(text):
    return np.load(io.BytesIO(base64.b64decode(text)))


def raw(fields):
    return np.frombuffer(base64.b64decode(fields["data"]), fields["dtype"]).reshape(fields["shape"])


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT])
def test_routed_experts_of_a_whole_answer_have_every_position(api, path):
    expected = choice(api, path, **ASKS)["routed_experts"]
    array = npy(expected)
    assert array.dtype == np.uint16
    assert np.array_equal(array, rows(0, num_prompt(api) + 2))
    top = {"routed_experts_format": "npy"}
    assert choice(api, path, top=top, **ASKS)["routed_experts"] == expected
    fields = choice(api, path, top={"routed_experts_format": "raw"}, routed_experts_prompt_start=2, **ASKS)
    fields = fields["routed_experts"]
    assert np.array_equal(raw(fields), rows(2, num_prompt(api) + 2))
    assert (fields["dtype"], fields["start"]) == ("<u2", 2)


def test_routed_experts_unasked_are_on_generate_alone(api, checkpoint):
    assert "routed_experts" in choice(api, GENERATE)
    for path, params in [(GENERATE, {"return_routed_experts": False}), (COMPLETIONS, {}), (CHAT, {})]:
        assert choice(api, path, **params).get("routed_experts") is None, path
    with serving(checkpoint) as off:
        off.join(routing=None)
        assert choice(off, GENERATE)["routed_experts"] is None


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT])
@pytest.mark.parametrize("form", ["npy", "raw"])
def test_routed_experts_of_events_join_to_the_whole(api, path, form):
    events = api.events(path, body(path, top={"routed_experts_format": form}, n=2, **ASKS))
    for index in range(2):
        parts = [part for event in events for part in event["choices"] if part["index"] == index]
        told = [part["routed_experts"] for part in parts if "routed_experts" in part]
        decode = npy if form == "npy" else raw
        assert np.array_equal(np.concatenate([*map(decode, told)]), rows(0, num_prompt(api) + 2))
        if form == "raw":
            assert [part["start"] for part in told] == [0, *range(num_prompt(api) - 1, num_prompt(api) + 2)]


def test_routed_experts_as_msgpack_are_bytes(api):
    for accept in ("application/msgpack", "application/json;q=0.5, Application/MsgPack; q=1"):
        response = api.post(GENERATE, body(GENERATE, prompt_logprobs=None), headers={"Accept": accept})
        assert response.headers["content-type"] == "application/msgpack"
        answer = msgspec.msgpack.decode(response.content)
        assert answer["choices"][0]["token_ids"] == api.speech[:3]
        assert np.array_equal(np.load(io.BytesIO(answer["choices"][0]["routed_experts"])), rows(0, 5))
    request = body(GENERATE, top={"routed_experts_format": "raw"})
    response = api.post(GENERATE, request, headers={"Accept": "application/msgpack"})
    fields = msgspec.msgpack.decode(response.content)["choices"][0]["routed_experts"]
    assert np.array_equal(np.frombuffer(fields["data"], fields["dtype"]).reshape(fields["shape"]), rows(0, 5))
    mistake = api.post(GENERATE, {"token_ids": []}, headers={"Accept": "application/msgpack"})
    assert (mistake.status_code, mistake.headers["content-type"]) == (400, "application/json")


def test_routed_experts_of_a_prompt_alone_have_its_positions(api):
    answer = choice(api, COMPLETIONS, max_tokens=0, echo=True, **ASKS)
    assert np.array_equal(npy(answer["routed_experts"]), rows(0, 3))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (GENERATE, {"routed_experts_prompt_start": 4}, "sampling_params.routed_experts_prompt_start"),
        (GENERATE, {"routed_experts_prompt_start": -1}, "sampling_params.routed_experts_prompt_start"),
        (GENERATE, {"return_routed_experts": "maybe"}, "sampling_params.return_routed_experts"),
        (GENERATE, {"top": {"routed_experts_format": "pickle"}}, "routed_experts_format"),
        (COMPLETIONS, {**ASKS, "routed_experts_prompt_start": 99}, "routed_experts_prompt_start"),
        (CHAT, {**ASKS, "routed_experts_prompt_start": 99}, "routed_experts_prompt_start"),
        (CHAT, {"routed_experts_format": 3}, "routed_experts_format"),
        (CHAT, {"top": {"routed_experts_format": "npy"}}, "routed_experts_format"),
        (COMPLETIONS, {"routed_experts_prompt_start": 1}, "routed_experts_prompt_start"),
        (
            GENERATE,
            {"top": {"routed_experts_format": "raw"}, "return_routed_experts": False},
            "routed_experts_format",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_routed_experts_wrong_field_is_refused_by_name(api, path, fields, param, stream):
    response = api.post(path, body(path, **fields) | {"stream": stream})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not api.engine.requests


def test_routed_experts_of_a_model_without_experts_are_refused(checkpoint):
    with serving(checkpoint) as dense:
        for path in (COMPLETIONS, CHAT):
            error = dense.post(path, body(path, **ASKS)).json()["error"]
            assert "has no experts" in error["message"]
            assert error["param"] == "return_routed_experts"
        assert dense.post(GENERATE, body(GENERATE)).status_code == 200


def test_openapi_has_the_forms_of_routed_experts(api):
    page = api.get("/openapi.json").json()
    content = page["paths"][GENERATE]["post"]["responses"]["200"]["content"]
    assert content["application/msgpack"] == content["application/json"]
    assert "application/msgpack" not in page["paths"][CHAT]["post"]["responses"]["200"]["content"]
    schema = page["components"]["schemas"]["GenerateChoice"]["properties"]["routed_experts"]
    assert {"$ref": "#/components/schemas/RawRoutedExperts"} in schema["anyOf"]
    assert any(one.get("contentEncoding") == "base64" for one in schema["anyOf"])


def metrics(api):
    return {
        (sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "model_name")): sample.value
        for family in text_string_to_metric_families(api.get("/metrics").text)
        for sample in family.samples
    }


@pytest.mark.parametrize("stream", [False, True])
def test_routed_experts_without_tokens_are_no_first_token(api, stream):
    api.engine.script = lambda request: itertools.islice(speak(api, request), 1)

    async def scenario():
        call = Call(api.app, GENERATE, body(GENERATE, top={"stream": stream}))
        await settle()
        call.leave()
        await call.task

    api.run(scenario())
    assert ("eagleray:time_to_first_token_seconds_count", "0") not in metrics(api)
    api.engine.script = lambda request: speak(api, request)
    choice(api, GENERATE)
    assert metrics(api)["eagleray:time_to_first_token_seconds_count", "0"] == 1


def test_metrics_have_the_load_of_experts(api):
    counts = np.array([[4, 0], [3, 3]])
    api.deliver(ExpertLoad(engine=ENGINE, counts=counts))
    values = metrics(api)
    assert values["eagleray:expert_tokens_total", "0", "0", "0"] == 4
    assert values["eagleray:expert_balance", "0", "0"] == 0.5
    assert values["eagleray:expert_balance", "0", "1"] == 1.0
