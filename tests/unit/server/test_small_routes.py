"""Routes of vLLM beside those that generate: renderings, the tokenizer's configuration, /invocations and the index."""

from __future__ import annotations

import gzip
import json

import pytest
from server_fakes import TEMPLATE, serving

USER = {"role": "user", "content": "hello"}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"


def post(api, path, body):
    response = api.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def sent(api):
    """What the last request to the engine asks for, without its name."""
    message = api.engine.requests[-1]
    return message.prompt_token_ids, message.sampling, message.stopping, message.cache_salt


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER], "max_tokens": 3, "seed": 4, "stop": ["x"], "cache_salt": "s"}),
        (CHAT, {"messages": [USER], "seed": 4, "logprobs": True, "top_logprobs": 2}),
        (COMPLETIONS, {"prompt": "hello again", "seed": 4, "max_tokens": None, "temperature": 0}),
        (COMPLETIONS, {"prompt": [5, 6], "seed": 4, "min_tokens": 2, "logit_bias": {"5": 1}, "max_tokens": 3}),
    ],
)
def test_render_of_a_request_generates_the_same(api, path, body):
    rendered = post(api, f"{path}/render", body)
    assert not api.engine.requests
    (rendered,) = rendered if path == COMPLETIONS else [rendered]
    post(api, path, body)
    expected = sent(api)
    post(api, GENERATE, rendered)
    assert sent(api) == expected


def test_render_of_several_prompts_is_a_list(api):
    prompts = post(api, f"{COMPLETIONS}/render", {"prompt": ["hello", "again"], "request_id": "mine"})
    assert [one["request_id"] for one in prompts] == ["cmpl-mine-0", "cmpl-mine-1"]
    encode = api.client.tokenizer.encode
    assert [one["token_ids"] for one in prompts] == [
        encode(text, add_special_tokens=True) for text in ("hello", "again")
    ]


def test_render_shows_the_places_of_tokens_on_request(api):
    body = {"prompt": "hello 😀 again", "return_token_offsets": True}
    (rendered,) = post(api, f"{COMPLETIONS}/render", body)
    text = api.client.tokenizer.decode(rendered["token_ids"], skip_special_tokens=False)
    places = rendered["token_offsets"]
    assert len(places) == len(rendered["token_ids"])
    assert (places[0][0], places[-1][1]) == (0, len(text))
    for prompt in ([5, 6], "hello"):
        fields = {"return_token_offsets": prompt != "hello"}
        assert post(api, f"{COMPLETIONS}/render", {"prompt": prompt, **fields})[0]["token_offsets"] is None
    cut = {"prompt": "hello there again", "truncate_prompt_tokens": 1, "return_token_offsets": True}
    assert post(api, f"{COMPLETIONS}/render", cut)[0]["token_offsets"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [USER | {"content": "hello " * 100}]}, "messages"),
        (CHAT, {"messages": [USER], "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": ["x"] * 5000}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
    ],
)
def test_render_of_a_wrong_request_is_refused(api, path, body, param):
    response = api.post(f"{path}/render", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_tokenizer_info_shows_the_configuration(checkpoint, api):
    assert api.get("/tokenizer_info").status_code == 404
    with serving(checkpoint, enable_tokenizer_info_endpoint=True) as open_api:
        info = open_api.get("/tokenizer_info").json()
        assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert (info["eos_token"], info["chat_template"]) == ("<|endoftext|>", TEMPLATE)
        assert "/tokenizer_info" in open_api.get("/openapi.json").json()["paths"]


def test_tokenizer_info_of_a_checkpoint_hides_paths_and_descriptions(checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    token = {"content": "<|endoftext|>", "lstrip": False, "special": True}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "vocab_file": "/home/somebody/vocab.json",
        "eos_token": token,
        "added_tokens_decoder": {"300": token},
        "additional_special_tokens": [token, "<x>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = tmp_path / "own.jinja"
    template.write_text("own")
    with serving(tmp_path, enable_tokenizer_info_endpoint=True, chat_template=str(template)) as api:
        assert api.get("/tokenizer_info").json() == {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|endoftext|>",
            "added_tokens_decoder": {"300": "<|endoftext|>"},
            "additional_special_tokens": ["<|endoftext|>", "<x>"],
            "chat_template": "own",
        }


def test_tokenizer_info_without_a_tokenizer_is_refused(checkpoint):
    with serving(checkpoint, enable_tokenizer_info_endpoint=True, skip_tokenizer_init=True) as api:
        assert "skip_tokenizer_init" in api.get("/tokenizer_info").json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER], "max_tokens": 2}),
        (COMPLETIONS, {"prompt": "hello", "max_tokens": 2}),
        (GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 2}}),
    ],
)
def test_invocations_do_what_the_body_asks_for(api, path, body):
    def answer(route):
        response = api.post(route, body, headers={"X-Request-Id": "mine"})
        return response.status_code, response.json() | {"created": 0}

    assert answer("/invocations") == answer(path)
    assert [event["choices"] for event in api.events("/invocations", body)] == [
        event["choices"] for event in api.events(path, body)
    ]


def test_invocations_take_gzip_bodies_and_name_ignored_fields(api):
    data = gzip.compress(json.dumps({"prompt": "hello", "max_tokens": 1, "nobody": 1}).encode())
    response = api.request("POST", "/invocations", content=data, headers={"content-encoding": "gzip"})
    assert response.status_code == 200, response.text
    assert response.headers["x-eagleray-ignored"] == "nobody"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"model": "tiny"}', b'{"text": "x"}'])
def test_invocations_of_nothing_known_are_refused(api, content):
    response = api.request("POST", "/invocations", content=content)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_invocations_errors_are_those_of_the_route(api):
    error = api.post("/invocations", {"prompt": "hello", "temperature": -1}).json()["error"]
    assert error["param"] == "temperature"


def test_index_lists_the_routes_without_a_key(checkpoint):
    with serving(checkpoint, api_key=["secret"]) as api:
        index = api.get("/").json()
        assert (index["name"], index["documentation"]) == ("eagleray", "/openapi.json")
        listed = {route["path"]: route["methods"] for route in index["routes"]}
        assert listed[CHAT] == ["POST"]
        assert listed["/ping"] == ["GET", "POST"]
        assert api.get(CHAT).status_code == 401
