"""/v1/chat/completions/batch: several conversations in one request."""

from __future__ import annotations

import pytest

PATH = "/v1/chat/completions/batch"
HELLO = [{"role": "user", "content": "hello"}]
AGAIN = [{"role": "user", "content": "again"}, {"role": "assistant", "content": "and "}]


def test_chat_batch_answers_each_conversation_in_order(api):
    answer = api.post(
        PATH, {"messages": [HELLO, AGAIN, HELLO], "max_tokens": 2}, headers={"X-Request-Id": "mine"}
    ).json()
    assert (answer["id"], answer["object"]) == ("chatcmpl-mine", "chat.completion")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"hello world"}
    sent = api.engine.requests
    assert len({message.request_id for message in sent}) == 3
    single = []
    for messages in (HELLO, AGAIN, HELLO):
        api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        single.append(api.engine.requests[-1].prompt_token_ids)
    assert [message.prompt_token_ids for message in sent[:3]] == single
    assert answer["usage"]["prompt_tokens"] == sum(map(len, single))
    assert answer["usage"]["completion_tokens"] == 6


def test_chat_batch_fields_hold_for_every_conversation(api):
    fields = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "max_tokens": 2, "temperature": 0}
    answer = api.post(PATH, {"messages": [HELLO, AGAIN], **fields}).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [api.speech[:2]] * 2
    assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [2, 2]
    assert answer["prompt_token_ids"] is None
    assert all(message.sampling.temperature == 0 for message in api.engine.requests)


def test_chat_batch_echo_is_that_of_each_conversation(api):
    fields = {"echo": True, "add_generation_prompt": False, "continue_final_message": True, "max_tokens": 1}
    opened = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    answer = api.post(PATH, {"messages": [AGAIN, opened], **fields}).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["and hello", "Well, hello"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": HELLO}, "messages[0]"),
        ({"messages": [HELLO, [{"role": "user"}]]}, "messages[1][0].content"),
        ({"messages": [HELLO], "n": 2}, "n"),
        ({"messages": [HELLO], "stream": True}, "stream"),
        ({"messages": [HELLO], "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"messages": [HELLO], "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [HELLO] * 5000}, "messages"),
    ],
)
def test_chat_batch_wrong_field_is_refused_by_name(api, body, param):
    response = api.post(PATH, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not api.engine.requests


def test_chat_batch_several_reasons_are_named_together(api):
    error = api.post(PATH, {"messages": [HELLO], "n": 3, "temperature": -1}).json()["error"]
    assert "`n`" in error["message"]
    assert "`temperature`" in error["message"]
