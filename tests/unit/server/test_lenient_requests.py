"""Bodies that programs for vLLM and OpenAI's API send: fields without an effect, types, and reasons of refusals."""

from __future__ import annotations

import json
import logging
import tracemalloc

import pytest
from server_fakes import serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hello"}
MINIMAL = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "hello"}}
HEADER = "x-eagleray-ignored"

SILENT = [
    {"best_of": 1},
    {"best_of": 2, "n": 2},
    {"suffix": ""},
    {"use_beam_search": False},
    {"use_beam_search": "false"},
    {"length_penalty": 1.0},
    {"length_penalty": 1},
    {"early_stopping": False},
    {"echo": False},
    {"spaces_between_special_tokens": True},
    {"include_reasoning": True},
    {"vllm_xargs": {}},
    {"kv_transfer_params": {}},
    {"kv_transfer_params": None},
    {"features": None},
    {"prompt_embeds": None},
    {"logits_processors": []},
    {"mm_processor_kwargs": {}},
    {"truncate_prompt_tokens": None},
    {"guided_json": None, "structured_outputs": None, "response_format": {"type": "text"}},
    {"mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0, "repeat_penalty": 1.0, "dry_multiplier": 0, "dry_base": 2},
    {"stream_options": {"include_obfuscation": True, "include_usage": False}, "stream": True},
    {"prompt_cache_key": "k", "safety_identifier": "me", "user": "me"},
    {"metadata": {"a": "b"}},
    {"store": False, "service_tier": "auto"},
    {"stream_options": {}},
    {"request_id": "mine", "session_id": "yours"},
]
SILENT_IN_CHAT = [
    {"logprobs": False, "top_logprobs": 0},
    {"parallel_tool_calls": True},
    {"parallel_tool_calls": False, "tool_choice": "auto"},
    {"reasoning_effort": "none"},
    {"verbosity": "medium"},
    {"documents": []},
    {"tools": [], "tool_choice": "none", "functions": []},
]


@pytest.mark.parametrize(
    ("path", "fields"),
    [*((path, fields) for path in MINIMAL for fields in SILENT), *((CHAT, fields) for fields in SILENT_IN_CHAT)],
)
def test_request_off_values_and_labels_are_accepted_silently(api, path, fields):
    response = api.post(path, MINIMAL[path] | {"max_tokens": 1} | fields)
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers


def test_request_id_and_session_of_the_body_name_the_request(api):
    response = api.post(COMPLETIONS, MINIMAL[COMPLETIONS] | {"max_tokens": 1, "request_id": "mine"})
    assert response.json()["id"] == "cmpl-mine"
    assert (
        api.post(COMPLETIONS, MINIMAL[COMPLETIONS] | {"request_id": "x" * 257}).json()["error"]["param"] == "request_id"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_request_ignored_fields_are_in_the_header_and_once_in_the_log(api, caplog, stream):
    body = MINIMAL[CHAT] | {
        "max_tokens": 1,
        "stream": stream,
        "store": True,
        "service_tier": "flex",
        "thoughts": {"a": 1},
    }
    if stream:
        body["stream_options"] = {"include_usage": True, "colour": "red"}
    names = ["store", "service_tier", "thoughts", *(["stream_options.colour"] if stream else [])]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            response = api.post(CHAT, body)
            assert response.status_code == 200, response.text
            assert sorted(response.headers[HEADER].split(", ")) == sorted(names)
    assert sorted(record.args[0] for record in caplog.records) == sorted(names)


def test_request_null_of_an_unknown_field_is_not_reported(api):
    assert HEADER not in api.post(CHAT, MINIMAL[CHAT] | {"max_tokens": 1, "thoughts": None}).headers


def test_request_reasoning_effort_that_no_template_uses_is_reported(api):
    assert (
        api.post(CHAT, MINIMAL[CHAT] | {"max_tokens": 1, "reasoning_effort": "low"}).headers[HEADER]
        == "reasoning_effort"
    )


def test_request_types_are_converted(api):
    body = {
        "max_tokens": "3",
        "n": 2.0,
        "temperature": "0.5",
        "ignore_eos": "true",
        "skip_special_tokens": 1,
        "stream": 0,
        "seed": "7",
        "stop_token_ids": ["9", 10.0],
        "logit_bias": {"5": "2.5"},
    }
    for path, minimal in MINIMAL.items():
        assert api.post(path, minimal | body).status_code == 200
        request = api.engine.requests[-1]
        assert (request.stopping.max_tokens, request.sampling.temperature) == (3, 0.5)
        assert request.stopping.eos_token_ids == ()
        assert request.stopping.stop_token_ids == (9, 10)
        assert request.sampling.logit_bias == {5: 2.5}
    assert len(api.engine.requests) == 4
    assert api.post(COMPLETIONS, {"prompt": [5.0, "6"], "max_tokens": 1}).status_code == 400
    assert api.post(COMPLETIONS, {"prompt": [5.0, 6.0], "max_tokens": 1}).status_code == 200
    assert api.engine.requests[-1].prompt_token_ids == [5, 6]


@pytest.mark.parametrize(
    ("fields", "params", "parts"),
    [
        ({"stop": 5}, ["stop"], []),
        ({"stop": ""}, ["stop"], []),
        ({"max_tokens": -1}, ["max_tokens"], ["at least 1, but it is -1"]),
        ({"stream_options": {"include_usage": True}}, ["stream_options"], ["only for requests with `stream` true"]),
        ({"max_tokens": 0, "temperature": -1, "tpo_p": 1}, ["max_tokens", "temperature"], []),
        ({"n": "two", "seed": {}}, ["n", "seed"], ["expected `int"]),
        ({"n": "two", "temperature": -1, "max_tokens": 0}, ["n", "max_tokens", "temperature"], []),
        ({"n_predict": 5}, ["n_predict"], ["call it `max_tokens`"]),
        ({"repeat_penalty": 1.2, "min_p": 2}, ["repeat_penalty", "min_p"], ["call it `repetition_penalty`"]),
        ({"xtc_probability": 0.5, "dry_multiplier": 0.8}, ["xtc_probability", "dry_multiplier"], []),
        (
            {"use_beam_search": True, "length_penalty": 0.5},
            ["use_beam_search", "length_penalty"],
            ["beam search (`use"],
        ),
        ({"ebnf": "a", "regex": "a+", "grammar": "x"}, ["ebnf", "regex", "grammar"], []),
        ({"trace_decode_token_ids": [5]}, ["trace_decode_token_ids"], ["in `sampling_params` of /inference"]),
        ({"logit_bias": {"x": 1}}, ["logit_bias"], ["the key 'x' is not a token id"]),
        ({"logit_bias": {"5": 1, "400": 1}}, ["logit_bias"], ["400", "0 to 319"]),
        ({"logit_bias": {"5": "high"}}, ["logit_bias"], ["the value of '5'"]),
    ],
)
@pytest.mark.parametrize("path", MINIMAL)
def test_request_one_error_names_every_reason(api, path, fields, params, parts):
    response = api.post(path, MINIMAL[path] | fields)
    error = response.json()["error"]
    message = error["message"]
    assert (response.status_code, error["param"]) == (400, params[0]), message
    places = [message.index(f"`{param}`") for param in params]
    assert places == sorted(places)
    assert all(part in message for part in parts), message
    assert not api.engine.requests or api.engine.aborted


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CLIENTS = {
    "instructor": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    "LangChain": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "pydantic-ai": {"tools": [TOOL], "tool_choice": "required"},
    "auto": {"tools": [TOOL]},
}


@pytest.mark.parametrize("client", CLIENTS)
def test_request_for_tool_calls_is_told_that_they_are_missing(api, client):
    error = api.post(CHAT, {"max_tokens": 0, **MINIMAL[CHAT], **CLIENTS[client]}).json()["error"]
    assert error["message"].startswith("this server does not support tool calls (`tools`"), error
    assert error["message"].endswith("; and `max_tokens` must be at least 1, but it is 0")
    assert (error["param"], error["code"], error["type"]) == ("tools", "unsupported_parameter", "invalid_request_error")
    assert "`--tool-call-parser`" in error["message"]


def test_request_for_tool_calls_with_a_field_of_a_wrong_type_names_both(api):
    error = api.post(CHAT, MINIMAL[CHAT] | {"tools": [TOOL], "max_tokens": "many"}).json()["error"]
    assert error["message"].startswith("this server does not support tool calls (`tools`"), error
    assert "; and `max_tokens`: expected `int" in error["message"]
    assert error["code"] == "unsupported_parameter"


def test_request_malformed_field_alone_has_no_code(api):
    assert api.post(CHAT, MINIMAL[CHAT] | {"max_tokens": 0, "n": 0}).json()["error"]["code"] is None


# Hostile bodies.


def test_request_with_a_million_unknown_fields_is_answered_within_bounds(checkpoint):
    fields = ",".join(f'"u{index}":1' for index in range(10**6))
    content = f'{{{fields},"prompt":"x","max_tokens":1}}'.encode()
    with serving(checkpoint) as api:
        tracemalloc.start()
        response = api.request("POST", COMPLETIONS, content=content)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "u0, and perhaps more"
    assert peak < 64 * 2**20


def test_request_types_of_very_many_values_are_not_converted(api):
    error = api.post(COMPLETIONS, {"prompt": [5], "stop_token_ids": ["5"] * 70_000, "max_tokens": "2"}).json()["error"]
    assert error["message"] == "`stop_token_ids[0]`: expected `int`, got `str`"


def test_request_types_beside_a_long_prompt_are_converted(api):
    error = api.post(COMPLETIONS, {"prompt": [5] * 70_000, "stop_token_ids": ["5"], "max_tokens": "2"}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_request_with_many_unknown_fields_counts_them(api):
    response = api.post(
        COMPLETIONS, MINIMAL[COMPLETIONS] | {"max_tokens": 1} | {f"u{index}": 1 for index in range(1000)}
    )
    assert response.headers[HEADER] == ", ".join([f"u{index}" for index in range(16)]) + ", and 984 more"


@pytest.mark.parametrize("path", MINIMAL)
def test_request_with_a_large_body_is_read_by_the_same_table(api, path):
    large = {"metadata": "x" * 2**21, "best_of": 1, "max_tokens": "2"}
    assert HEADER not in api.post(path, MINIMAL[path] | large).headers
    assert api.engine.requests[-1].stopping.max_tokens == 2
    assert api.post(path, MINIMAL[path] | large | {"thoughts": 1}).headers[HEADER] == "thoughts, and perhaps more"
    error = api.post(path, MINIMAL[path] | large | {"thoughts": 1, "regex": "a+", "n": 0}).json()["error"]
    assert error["param"] == "regex" and "`n` must be" in error["message"]
    for content in (b'{"metadata": "' + b"x" * 2**21, b'[{"metadata": "' + b"x" * 2**21 + b'"}]'):
        assert api.request("POST", path, content=content).status_code == 400


def test_request_names_of_ignored_fields_are_cut_and_plain(api, caplog):
    names = ["x" * 10**6, "two\r\nlines: 1", "a,b", "ü😀", ""]
    with caplog.at_level(logging.WARNING):
        response = api.post(COMPLETIONS, MINIMAL[COMPLETIONS] | {"max_tokens": 1} | dict.fromkeys(names, 1))
    assert response.headers[HEADER] == f"{'x' * 64}..., two??lines:?1, a?b, ??, ?"
    assert all(len(record.getMessage()) < 300 and "\n" not in record.getMessage() for record in caplog.records)


def test_request_log_of_ignored_fields_is_bounded(api, caplog):
    with caplog.at_level(logging.WARNING):
        for first in range(0, 400, 10):
            fields = {f"u{index}": 1 for index in range(first, first + 10)}
            assert api.post(COMPLETIONS, MINIMAL[COMPLETIONS] | {"max_tokens": 1} | fields).status_code == 200
    assert len(caplog.records) == 257
    assert "from now on they are not logged" in caplog.records[-1].getMessage()


def test_request_with_many_wrong_fields_names_some_and_counts_the_others(api):
    fields = {name: {} for name in ("n", "seed", "top_p", "min_p", "stop", "top_k", "stream", "timeout", "min_tokens")}
    fields |= {name: {} for name in ("priority", "max_tokens", "temperature", "ignore_eos", "logprobs", "bad_words")}
    fields |= {name: {} for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids")}
    message = api.post(COMPLETIONS, MINIMAL[COMPLETIONS] | fields).json()["error"]["message"]
    assert message.count("; and ") == 16
    assert message.endswith("; and 3 more fields are wrong")


@pytest.mark.parametrize("name", ["thoughts", "metadata", "logit_bias", "response_format"])
@pytest.mark.parametrize("depth", [900, 100_000])
def test_request_nested_deeply_is_answered(api, name, depth):
    content = json.dumps(MINIMAL[COMPLETIONS])[:-1] + f', "max_tokens": 1, "{name}": ' + "[" * depth + "]" * depth + "}"
    assert api.request("POST", COMPLETIONS, content=content).status_code in (200, 400)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1" + "0" * 5000, "-1" + "0" * 400, "1e400"])
@pytest.mark.parametrize("name", ["max_tokens", "temperature", "thoughts", "best_of", "logit_bias"])
def test_request_numbers_beyond_all_types_are_refused_or_ignored(api, name, number):
    value = f'{{"5": {number}}}' if name == "logit_bias" else number
    content = json.dumps(MINIMAL[COMPLETIONS])[:-1] + f', "unknown": 1, "{name}": {value}' + "}"
    response = api.request("POST", COMPLETIONS, content=content)
    assert response.status_code in (200, 400), response.text
    assert response.status_code == 400 or name in ("thoughts", "max_tokens")
