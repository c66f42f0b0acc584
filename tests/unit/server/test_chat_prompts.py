"""The prompt of a conversation: messages, template variables and templates of requests, and the options about them."""

from __future__ import annotations

import json

import pytest
from server_fakes import SPEECH

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for document in documents or [] %}<{{ document.title }}>{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}{{ message.mood }};"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
    "{{ tone }}{{ reasoning_effort }}{{ enable_thinking }}"
)


def prompt_of(api, *messages, **body):
    response = api.post(PATH, {"messages": [*messages] or [USER], "max_tokens": 1, **body})
    assert response.status_code == 200, response.text
    return api.client.tokenizer.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_chat_history_of_an_agent_reaches_the_template(served):
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}]
    history = [
        USER | {"mood": "!"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain", "cache_control": {}}]},
        {"role": "critic", "content": "ok"},
    ]
    with served() as api:
        assert prompt_of(api, *history) == "user:hello!;assistant:;Paristool:rain;critic:ok;"


def test_chat_tools_without_a_choice_of_them_are_shown_to_the_model(served):
    with served() as api:
        assert prompt_of(api, tools=[TOOL], tool_choice="none") == "<f>user:hello;"
        assert prompt_of(api, tools=[], tool_choice="auto", documents=[{"title": "d", "text": "x"}]) == "<d>user:hello;"
        assert api.post(PATH, {"messages": [USER], "tools": [TOOL], "tool_choice": "auto"}).status_code == 400


def test_chat_reasoning_effort_sets_the_variables_of_the_template(served):
    with served() as api:
        assert prompt_of(api, reasoning_effort="low") == "user:hello;lowTrue"
        assert prompt_of(api, reasoning_effort="none") == "user:hello;noneFalse"
        assert prompt_of(api, reasoning_effort="low", chat_template_kwargs={"enable_thinking": 5}) == "user:hello;low5"
        response = api.post(PATH, {"messages": [USER], "max_tokens": 1, "reasoning_effort": "low"})
        assert "x-eagleray-ignored" not in response.headers


def test_chat_default_template_variables_yield_to_those_of_the_request(served):
    with served(default_chat_template_kwargs={"tone": "calm", "enable_thinking": False}) as api:
        assert prompt_of(api) == "user:hello;calmFalse"
        assert prompt_of(api, chat_template_kwargs={"tone": "loud"}) == "user:hello;loudFalse"
        assert prompt_of(api, reasoning_effort="high") == "user:hello;calmhighTrue"
        text = api.post("/tokenize", {"messages": [USER]}).json()["tokens"]
        assert text == api.engine.requests[0].prompt_token_ids


@pytest.mark.parametrize("trusted", [False, True])
def test_chat_empty_template_of_a_request_is_not_given(served, trusted):
    with served(trust_request_chat_template=trusted) as api:
        for empty in ({"chat_template": ""}, {"chat_template_kwargs": {"chat_template": ""}}):
            assert prompt_of(api, **empty) == prompt_of(api)


def test_chat_template_of_a_request_needs_the_option(served):
    own = {"chat_template": "<{{ messages[0].content }}>"}
    with served() as api:
        for body in (own, {"chat_template_kwargs": own}):
            error = api.post(PATH, {"messages": [USER], **body}).json()["error"]
            assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
    with served(trust_request_chat_template=True) as api:
        assert prompt_of(api, **own) == "<hello>"
        assert prompt_of(api, chat_template_kwargs=own) == "<hello>"
        for wrong in ("{% if %}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].x.y }}", "x" * 2**19, "{{ (" * 5000):
            assert api.post(PATH, {"messages": [USER], "chat_template": wrong}).status_code == 400, wrong[:40]


def test_chat_content_format_is_an_option(served):
    with served(chat_template_content_format="openai") as api:
        assert prompt_of(api) == "user:[{'type': 'text', 'text': 'hello'}];"


def test_chat_response_role_is_an_option(served):
    with served(response_role="narrator") as api:
        body = {"messages": [USER], "max_tokens": 1}
        assert api.post(PATH, body).json()["choices"][0]["message"]["role"] == "narrator"
        assert api.events(PATH, body)[0]["choices"][0]["delta"]["role"] == "narrator"
        body |= {"messages": [USER, {"role": "assistant", "content": "I"}], "add_generation_prompt": False}
        assert api.post(PATH, body).json()["choices"][0]["message"]["role"] == "assistant"


def test_chat_unusual_messages_are_bounded(api):
    deep = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}]}
    assert api.post(PATH, {"messages": [deep, USER], "max_tokens": 1}).status_code == 200
    content = f'{{"messages": [{json.dumps(USER)[:-1]}, "x": {"[" * 900}{"]" * 900}}}], "max_tokens": 1}}'
    assert api.request("POST", PATH, content=content).status_code == 200
    error = api.post(PATH, {"messages": [{"role": "x" * 65, "content": "x"}]}).json()["error"]
    assert error["param"] == "messages[0].role"
    many = {f"key{index}": index for index in range(10_000)}
    assert SPEECH in api.post(PATH, {"messages": [USER | many]}).text


def test_models_root_is_the_model_that_was_asked_for(api):
    (card, _) = api.get("/v1/models").json()["data"]
    assert card["root"] == api.config.model.model
