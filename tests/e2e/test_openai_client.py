"""A served checkpoint and the official `openai` client."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import openai
import pytest
from checkpoints import make_checkpoint
from oracle import oracle
from serving import serve

from eagleray.client.text.tokenizer import Tokenizer

KEY = "secret-key"
OTHER_KEY = "other-secret"
MODEL = "tiny"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")


@pytest.fixture(scope="module")
def server(checkpoint):
    options = ("--served-model-name", MODEL, "--api-key", KEY, "--max-model-len", "512")
    options += ("--tool-call-parser", "hermes", "--structured-outputs-backend", "llguidance")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLERAY_API_KEY", OTHER_KEY)
        with serve(str(checkpoint), *options) as server:
            yield server
    assert server.process.returncode == 0, server.log


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer.load(checkpoint)


def complete(client, prompt="The quick", **fields):
    return client.completions.create(model=MODEL, prompt=prompt, temperature=0, **fields)


MESSAGES = [{"role": "user", "content": "Hello there"}]


def test_models_list_and_retrieve_served_model(client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_completion_equals_greedy_model(client, checkpoint, tokenizer):
    completion = complete(client, max_tokens=20, extra_body={"ignore_eos": True, "return_token_ids": True})
    choice = completion.choices[0]
    prompt = tokenizer.encode("The quick", add_special_tokens=True)
    oracle(checkpoint).assert_greedy(prompt, choice.token_ids)
    assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert choice.finish_reason == "length"
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.completion_tokens == 20
    assert completion.usage.total_tokens == len(prompt) + 20


def test_completion_streamed_equals_whole(client):
    whole = complete(client, max_tokens=30, extra_body={"ignore_eos": True})
    events = list(
        complete(
            client, max_tokens=30, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
        )
    )
    assert "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "length"
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == 30
    assert len({event.id for event in events}) == 1


def test_chat_streamed_equals_whole(client):
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=12)
    assert whole.choices[0].message.role == "assistant"
    events = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=12, stream=True
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == whole.choices[0].message.content


def test_completion_several_choices_with_seed_repeat(client):
    def texts():
        completion = client.completions.create(
            model=MODEL, prompt="once", n=3, seed=5, temperature=1.0, max_tokens=12, extra_body={"ignore_eos": True}
        )
        return [choice.text for choice in sorted(completion.choices, key=lambda choice: choice.index)]

    assert texts() == texts()
    assert len(set(texts())) == 3


def test_completion_several_prompts_keep_order(client):
    completion = complete(client, prompt=["one", "two words", [5, 6, 7]], max_tokens=4)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert completion.choices[0].text == complete(client, prompt="one", max_tokens=4).choices[0].text


def test_completion_logprobs_match_oracle(client, tokenizer):
    completion = complete(client, max_tokens=5, logprobs=3)
    logprobs = completion.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == completion.usage.completion_tokens
    assert "".join(logprobs.tokens) == completion.choices[0].text
    for best, value in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True):
        assert value == pytest.approx(max(best.values()))
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)


def test_completion_echo_returns_prompt(client):
    completion = complete(client, max_tokens=3, echo=True, logprobs=1)
    assert completion.choices[0].text.startswith("The quick")
    assert completion.choices[0].logprobs.token_logprobs[0] is None
    assert "".join(completion.choices[0].logprobs.tokens) == completion.choices[0].text


def test_completion_stop_string_ends_text_and_is_hidden(client):
    text = complete(client, max_tokens=40, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[10:14]
    expected = text[: text.index(stop)]
    whole = complete(client, max_tokens=40, stop=[stop], extra_body={"ignore_eos": True}).choices[0]
    assert (whole.text, whole.finish_reason) == (expected, "stop")
    events = complete(client, max_tokens=40, stop=[stop], stream=True, extra_body={"ignore_eos": True})
    assert "".join(event.choices[0].text for event in events) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"top_p": 2}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 10_000_000]}, "prompt"),
        ({"prompt": [5] * 600}, "prompt"),
        ({"extra_body": {"ebnf": "x"}}, "ebnf"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_completion_invalid_field_is_bad_request_with_its_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(**{"model": MODEL, "prompt": "x", **fields})
    assert raised.value.param == param
    assert raised.value.body["message"]


def test_errors_raise_types_of_openai_client(server, client):
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="x")
    with (
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def metric(server, name: str) -> float:
    text = httpx.get(server.url.removesuffix("/v1") + "/metrics").text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"eagleray:{name}{{"))


def wait_for_metric(server, name: str, value: float) -> None:
    deadline = time.monotonic() + 20
    while metric(server, name) != value:
        assert time.monotonic() < deadline, f"{name} is {metric(server, name)}, not {value}"
        time.sleep(0.05)


def test_disconnected_client_frees_its_request(server, client):
    stream = complete(client, max_tokens=500, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_for_metric(server, "num_requests_running", 0)
    whole = {"model": MODEL, "prompt": "x", "max_tokens": 500, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/completions", json=whole, headers={"Authorization": f"Bearer {KEY}"}, timeout=0.05)
    wait_for_metric(server, "num_requests_running", 0)
    assert complete(client, max_tokens=3).usage.completion_tokens > 0


def test_slow_reader_gets_everything_and_delays_no_other(client):
    slow = complete(client, max_tokens=200, stream=True, extra_body={"ignore_eos": True})
    first = next(iter(slow))
    began = time.monotonic()
    assert complete(client, prompt="other", max_tokens=5).choices[0].text is not None
    assert time.monotonic() - began < 20
    rest = "".join(event.choices[0].text for event in slow)
    whole = complete(client, max_tokens=200, extra_body={"ignore_eos": True}).choices[0].text
    assert first.choices[0].text + rest == whole


def test_generate_route_token_ids_equal_greedy_model(server, checkpoint):
    prompt = [5, 6, 7, 8]
    answer = httpx.post(
        server.url.removesuffix("/v1") + "/inference/v1/generate",
        json={"token_ids": prompt, "sampling_params": {"temperature": 0, "max_tokens": 8, "ignore_eos": True}},
        headers={"Authorization": f"Bearer {KEY}"},
    )
    assert answer.status_code == 200, answer.text
    oracle(checkpoint).assert_greedy(prompt, answer.json()["choices"][0]["token_ids"])


def test_tokenize_and_detokenize_round_trip(server, tokenizer):
    base, headers = server.url.removesuffix("/v1"), {"Authorization": f"Bearer {KEY}"}
    tokens = httpx.post(base + "/tokenize", json={"model": MODEL, "prompt": "héllo"}, headers=headers).json()["tokens"]
    assert tokens == tokenizer.encode("héllo", add_special_tokens=True)
    text = httpx.post(base + "/detokenize", json={"model": MODEL, "tokens": tokens}, headers=headers).json()["prompt"]
    assert text == "héllo"


def test_api_keys_are_not_visible_outside_the_server(server):
    """Keys are not in command lines, environments of child processes, the log or /server_info."""
    info = httpx.get(server.url.removesuffix("/v1") + "/server_info", headers={"Authorization": f"Bearer {OTHER_KEY}"})
    assert info.status_code == 200
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (server.process.pid, *server.children)]
    environments = [Path(f"/proc/{pid}/environ").read_text() for pid in server.children]
    for text in (info.text, server.log, *lines, *environments):
        assert KEY not in text
        assert OTHER_KEY not in text


@pytest.mark.parametrize("route", ["/health", "/live", "/ready", "/version", "/openapi.json", "/metrics"])
def test_operator_routes_return_ok(server, route):
    answer = httpx.get(server.url.removesuffix("/v1") + route, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200


CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY | {"additionalProperties": False}}}


def test_chat_required_call_comes_whole_and_streamed_and_takes_a_result(client):
    fields = {"model": MODEL, "tools": [WEATHER], "seed": 1, "max_tokens": 200}
    required = {**fields, "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = client.chat.completions.create(messages=MESSAGES, **required).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "weather")
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    with client.chat.completions.stream(messages=MESSAGES, **required) as stream:
        streamed = stream.get_final_completion().choices[0]
    (again,) = streamed.message.tool_calls
    assert (streamed.finish_reason, again.function.arguments) == ("tool_calls", call.function.arguments)
    assert again.id != call.id
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history = [*MESSAGES, choice.message, result]
    assert client.chat.completions.create(messages=history, tool_choice="none", **fields).choices[0].message.content


def test_chat_strict_schema_that_cannot_be_followed_names_the_tool(client):
    function = {"name": "odd", "strict": True, "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    with pytest.raises(openai.BadRequestError, match="not supported: `not`, first at #/properties/a;") as refused:
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[WEATHER, {"type": "function", "function": function}]
        )
    assert refused.value.param == "tools[1].function.parameters"
