"""Reasoning on the routes for conversations: its fields, events and limits."""

from __future__ import annotations

import json

import pytest

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hello"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if enable_thinking is not defined or enable_thinking %}<|im_start|>assistant\n<think>\n"
    "{% else %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}{# <tool_call> </tool_call> #}"
)
THOUGHT = "again and again, and again"
SPEECH = f"{THOUGHT}\n</think>\n\nhello there"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FUNCTION = {"name": "f", "parameters": {"type": "object"}}


@pytest.fixture
def api(shared_api):
    """An application, which has had other requests."""
    shared_api.say(SPEECH)
    return shared_api


def post(api, path, **body):
    known = {"input": "hello"} if path == RESPONSES else {"messages": [USER], "max_tokens": 500}
    response = api.post(path, {**known, **body})
    assert response.status_code == 200, response.text
    return response


def events(api, path, **body):
    blocks = post(api, path, stream=True, **body).text.strip().split("\n\n")
    return [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]


def num_tokens(api, text):
    return len(api.client.tokenizer.encode(text, add_special_tokens=False))


def test_chat_reasoning_has_fields_and_tokens_of_its_own(api):
    answer = post(api, CHAT).json()
    message = answer["choices"][0]["message"]
    reasoning = message["reasoning"]
    assert reasoning == message["reasoning_content"] and reasoning.strip() == THOUGHT
    assert message["content"].strip() == "hello there"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens(api, reasoning)}


def test_chat_streamed_reasoning_joins_to_the_whole(api):
    message = post(api, CHAT).json()["choices"][0]["message"]
    *found, usage = api.events(CHAT, {"messages": [USER], "stream_options": {"include_usage": True}})
    deltas = [event["choices"][0]["delta"] for event in found]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens(api, message["reasoning"])


def test_chat_without_include_reasoning_hides_it_and_its_tokens(api):
    body = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    choice = post(api, CHAT, **body).json()["choices"][0]
    assert (choice["message"]["reasoning"], choice["logprobs"], choice["token_ids"]) == (None, None, None)
    assert "reasoning_content" not in choice["message"]
    for event in api.events(CHAT, {"messages": [USER], **body}):
        (choice,) = event["choices"]
        assert "reasoning" not in choice["delta"]
        assert choice["logprobs"] is None and choice["token_ids"] is None


def test_chat_answer_that_ends_in_its_reasoning_has_no_content(api):
    (choice,) = post(api, CHAT, max_tokens=3).json()["choices"]
    assert choice["message"]["content"] is None and choice["message"]["reasoning"]
    assert choice["finish_reason"] == "length"


def test_chat_prompt_that_closed_the_thinking_leaves_all_text_to_the_content(api):
    api.say("hello there")
    answer = post(api, CHAT, chat_template_kwargs={"enable_thinking": False}).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("hello there", None)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_chat_calls_after_reasoning_are_read(api):
    api.say(f"{THOUGHT}</think>{CALL}")
    tools = [{"type": "function", "function": FUNCTION}]
    message = post(api, CHAT, tools=tools, tool_choice="auto").json()["choices"][0]["message"]
    assert message["reasoning"] == THOUGHT and message["content"] is None
    assert message["tool_calls"][0]["function"]["name"] == "f"


def test_responses_reasoning_is_an_item_before_the_text(api):
    answer = post(api, RESPONSES).json()
    thought, message = answer["output"]
    assert (thought["type"], thought["summary"], thought["status"]) == ("reasoning", [], "completed")
    (part,) = thought["content"]
    assert part["type"] == "reasoning_text" and part["text"].strip() == THOUGHT
    assert message["content"][0]["text"].strip() == "hello there"
    details = answer["usage"]["output_tokens_details"]
    assert details == {"reasoning_tokens": num_tokens(api, part["text"])}
    found = events(api, RESPONSES)
    kinds = [event["type"].removeprefix("response.") for event in found if not event["type"].endswith(".delta")]
    item = ["output_item.added", "content_part.added", "done", "content_part.done", "output_item.done"]
    thinking = [kind if kind != "done" else "reasoning_text.done" for kind in item]
    text = [kind if kind != "done" else "output_text.done" for kind in item]
    assert kinds == ["created", "in_progress", *thinking, *text, "completed"]
    ids = [item.pop("id") for item in (*answer["output"], *found[-1]["response"]["output"])]
    assert found[-1]["response"]["output"] == answer["output"] and len(set(ids)) == 4
    deltas = [event["delta"] for event in found if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == part["text"]


def test_responses_without_include_reasoning_hides_it(api):
    answer = post(api, RESPONSES, include_reasoning=False).json()
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    fields = {"include_reasoning": False, "include": ["message.output_text.logprobs"]}
    found = events(api, RESPONSES, **fields)
    assert not [event for event in found if "reasoning" in event["type"]]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == []


def test_messages_thinking_is_a_block_with_a_signature(api):
    thinking, text = post(api, MESSAGES).json()["content"]
    assert thinking["type"] == "thinking" and thinking["thinking"].strip() == THOUGHT
    assert thinking["signature"].startswith("msg_")
    assert text["type"] == "text" and text["text"].strip() == "hello there"
    found = events(api, MESSAGES)
    start = next(event for event in found if event["type"] == "content_block_start")
    assert start["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta" and event["index"] == 0]
    assert [delta["type"] for delta in deltas] == ["thinking_delta"] * (len(deltas) - 1) + ["signature_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == thinking["thinking"]


def test_messages_thinking_options_reach_prompt_and_engine(api):
    budget = num_tokens(api, THOUGHT)

    def prompt(**thinking):
        post(api, MESSAGES, thinking=thinking)
        return api.client.tokenizer.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)

    assert prompt(type="disabled").endswith("</think>\n\n")
    assert prompt(type="adaptive").endswith("<think>\n")
    response = api.post(
        MESSAGES,
        {"messages": [USER], "max_tokens": 500, "thinking": {"type": "enabled", "budget_tokens": budget}},
    )
    # the tokenizer of this checkpoint has no token </think>, by which a budget could be kept
    assert response.status_code == 400 and "`thinking.budget_tokens`" in response.json()["error"]["message"]
