"""/v1/chat/completions, field by field."""

from __future__ import annotations

import pytest
from server_fakes import FINGERPRINT, SPEECH, serving

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def chat(api, *messages, **body):
    response = api.post(PATH, {"messages": [*messages] or [USER], **body})
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(api, *messages, **body):
    """The prompt that reaches the engine."""
    chat(api, *messages, max_tokens=1, **body)
    return api.client.tokenizer.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_chat_whole_answer_has_message_and_usage(api):
    answer = api.post(PATH, {"model": "tiny", "messages": [USER]}, headers={"X-Request-Id": "mine"}).json()
    num_prompt = len(api.engine.requests[-1].prompt_token_ids)
    assert answer.pop("created") > 0
    assert answer == {
        "id": "chatcmpl-mine",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": SPEECH,
                    **dict.fromkeys(["refusal", "annotations", "audio", "function_call", "reasoning"]),
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
                "routed_experts": None,
            }
        ],
        "system_fingerprint": FINGERPRINT,
        **dict.fromkeys(["service_tier", "prompt_logprobs", "prompt_token_ids", "prompt_text"]),
        **dict.fromkeys(["kv_transfer_params", "ec_transfer_params", "metrics"]),
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(api.speech) + 1,
            "total_tokens": num_prompt + len(api.speech) + 1,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }


def test_chat_stream_events_join_to_the_answer(api):
    body = {"messages": [USER], "max_completion_tokens": 2, "stream_options": {"include_usage": True}}
    events = api.events(PATH, body, headers={"X-Request-Id": "mine"})
    head = {
        "id": "chatcmpl-mine",
        "object": "chat.completion.chunk",
        "created": events[0]["created"],
        "model": "tiny",
    }
    choice = {"index": 0, "logprobs": None, "stop_reason": None, "token_ids": None}
    first = choice | {"delta": {"role": "assistant", "content": "hello"}, "finish_reason": None}
    second = choice | {"delta": {"content": " world"}, "finish_reason": "length"}
    num_prompt = len(api.engine.requests[-1].prompt_token_ids)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": 2,
        "total_tokens": num_prompt + 2,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    assert events == [
        head | {"choices": [first], "usage": None, "prompt_token_ids": None},
        head | {"choices": [second], "usage": None, "system_fingerprint": FINGERPRINT},
        head | {"choices": [], "usage": usage, "system_fingerprint": FINGERPRINT},
    ]


def test_chat_stream_first_event_of_each_choice_has_the_role(api):
    events = api.events(PATH, {"messages": [USER], "n": 2})
    texts = {0: "", 1: ""}
    roles = {0: [], 1: []}
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"]["content"]
        roles[choice["index"]].append(choice["delta"].get("role"))
    assert texts == {0: SPEECH, 1: SPEECH}
    for seen in roles.values():
        assert seen[0] == "assistant"
        assert not any(seen[1:])


def test_chat_stream_with_continuous_usage_counts_up(api):
    body = {
        "messages": [USER],
        "max_tokens": 2,
        "stream_options": {"continuous_usage_stats": True, "include_usage": True},
    }
    assert [event["usage"]["completion_tokens"] for event in api.events(PATH, body)] == [1, 2, 2]


def test_chat_logprobs_have_bytes(api):
    api.speech = api.client.tokenizer.encode("😀", add_special_tokens=False)
    first = api.speech[0]
    content = chat(api, logprobs=True, top_logprobs=2, max_tokens=4)["choices"][0]["logprobs"]["content"]
    tokenizer = api.client.tokenizer

    def entry(token_id, logprob):
        return {
            "token": tokenizer.token_to_text(token_id),
            "logprob": logprob,
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    assert content[0] == entry(first, -1.5) | {"top_logprobs": [entry(first + 1, -1.0), entry(first, -1.5)]}
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "😀"
    assert chat(api, logprobs=True, max_tokens=1)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert chat(api, logprobs=False, max_tokens=1)["choices"][0]["logprobs"] is None


def test_chat_logprobs_of_a_stream_equal_those_of_the_whole(api):
    body = {"logprobs": True, "top_logprobs": 1}
    whole = chat(api, **body)["choices"][0]["logprobs"]["content"]
    events = api.events(PATH, {"messages": [USER], **body})
    assert [entry for event in events for entry in event["choices"][0]["logprobs"]["content"]] == whole


def test_chat_logprob_token_ids_are_reported(api):
    choice = chat(api, logprobs=True, top_logprobs=1, logprob_token_ids=[40], max_tokens=1)["choices"][0]
    (entry,) = choice["logprobs"]["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-1.0, -20.0]
    assert chat(api, logprob_token_ids=[40], max_tokens=1)["choices"][0]["logprobs"] is not None


def test_chat_on_request_returns_token_ids_and_prompt_logprobs(api):
    body = {"return_token_ids": True, "prompt_logprobs": 0, "max_tokens": 2}
    answer = chat(api, **body)
    prompt = api.engine.requests[-1].prompt_token_ids
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == api.speech[:2]
    assert len(answer["prompt_logprobs"]) == len(prompt)
    assert answer["prompt_logprobs"][0] is None
    assert list(answer["prompt_logprobs"][1]) == [str(prompt[1])]
    first, second = api.events(PATH, {"messages": [USER], **body})
    assert first["prompt_token_ids"] == prompt
    assert first["prompt_logprobs"] == answer["prompt_logprobs"]
    assert [event["choices"][0]["token_ids"] for event in (first, second)] == [[token] for token in api.speech[:2]]
    assert not second.keys() & {"prompt_token_ids", "prompt_logprobs"}


def test_chat_messages_are_rendered_by_the_template(api):
    assert prompt_of(api) == PROMPT
    parts = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    assert prompt_of(api, parts) == PROMPT
    developer = {"role": "developer", "content": "be brief"}
    assert prompt_of(api, developer, USER) == "<|im_start|>system\nbe brief<|im_end|>\n" + PROMPT
    assert "(Ann) hello" in prompt_of(api, USER | {"name": "Ann"})
    assert prompt_of(api, chat_template_kwargs={"mood": "happy"}) == PROMPT + "happy"
    assert prompt_of(api, add_generation_prompt=False) == PROMPT.removesuffix("<|im_start|>assistant\n")


def test_chat_continue_final_message_leaves_it_open(api):
    open_end = {"role": "assistant", "content": "I am"}
    assert prompt_of(api, USER, open_end, continue_final_message=True) == PROMPT + "I am"


def test_chat_message_of_an_answer_is_accepted(api):
    message = chat(api)["choices"][0]["message"]
    assert SPEECH in prompt_of(api, USER, message, USER)
    more = {"tool_calls": None, "function_call": None, "audio": None, "annotations": []}
    assert SPEECH in prompt_of(api, USER, message | more, USER)


def test_chat_without_max_tokens_ends_at_the_models_length(api):
    chat(api)
    (request,) = api.engine.requests
    assert request.stopping.max_tokens == 64 - len(request.prompt_token_ids)
    chat(api, max_tokens=5)
    chat(api, max_completion_tokens=5)
    chat(api, max_tokens=5, max_completion_tokens=5)
    assert [request.stopping.max_tokens for request in api.engine.requests[1:]] == [5, 5, 5]


def test_chat_long_conversation_is_tokenized_like_a_short_one(api):
    api.join(max_model_len=100_000)
    text = "hello there and again " * 400
    assert text in prompt_of(api, USER | {"content": text})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [USER | {"name": 5}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER | {"content": "hello " * 100}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": ""}, "tool_choice"),
        ({"tool_choice": []}, "tool_choice"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"chat_template": "x"}, "chat_template"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"best_of": 2}, "best_of"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
    ],
)
def test_chat_wrong_field_is_refused_by_name(api, body, param):
    response = api.post(PATH, {"messages": [USER], **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not api.engine.requests


def test_chat_fields_without_effect_leave_answer_and_prompt(api):
    nothing = ["tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "response_format", "stop"]
    nothing += [
        "modalities",
        "audio",
        "prediction",
        "reasoning_effort",
        "store",
        "metadata",
        "service_tier",
        "logprobs",
    ]
    no_features = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    plain, plain_request = chat(api, seed=1), api.engine.requests[-1]
    for fields in (dict.fromkeys(nothing), no_features | {"store": False}):
        answer, request = chat(api, seed=1, **fields), api.engine.requests[-1]
        assert {**answer, "id": plain["id"], "created": plain["created"]} == plain
        assert (request.prompt_token_ids, request.sampling) == (plain_request.prompt_token_ids, plain_request.sampling)


def test_chat_without_a_template_is_refused(checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    with serving(tmp_path) as api:
        error = api.post(PATH, {"messages": [USER]}).json()["error"]
    assert error["param"] == "messages"
    assert "chat template" in error["message"]
