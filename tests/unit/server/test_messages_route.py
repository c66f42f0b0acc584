"""/v1/messages and its count of tokens, with the exact events and errors of Anthropic's API."""

from __future__ import annotations

import asyncio
import json

import pytest
from server_fakes import SPEECH, Call, Chunk, FinishReason, serving, settle

PATH = "/v1/messages"
USER = {"role": "user", "content": "hello"}
PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "one"}
TOOL = {"name": "f", "description": "does it", "input_schema": {"type": "object"}}
SHOW_ALL = "{% for message in messages %}{{ message | tojson }}\n{% endfor %}{{ tools | tojson }}"


def send(api, *messages, path=PATH, **body):
    return api.post(path, {"messages": [*messages] or [USER], "max_tokens": 30, **body})


def answer(api, *messages, **body):
    response = send(api, *messages, **body)
    assert response.status_code == 200, response.text
    return response.json()


def named_events(text):
    """Return the names and the data of a stream's events."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(api):
    return api.client.tokenizer.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_messages_whole_answer_has_content_and_usage(api):
    response = send(api, model="tiny")
    assert prompt_of(api) == PROMPT
    assert response.json() == {
        "id": f"msg_{response.headers['x-request-id']}",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": SPEECH}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(api.engine.requests[-1].prompt_token_ids),
            "output_tokens": len(api.speech) + 1,
        },
    }


def test_messages_stream_events_come_in_order(api):
    response = send(api, stream=True, max_tokens=2)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    num_prompt = len(api.engine.requests[-1].prompt_token_ids)
    message = {
        "id": f"msg_{response.headers['x-request-id']}",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": num_prompt, "output_tokens": 1},
    }
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        for text in ("hello", " world")
    ]
    assert named_events(response.text) == [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *deltas,
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
            "usage": {"input_tokens": num_prompt, "output_tokens": 2},
        },
        {"type": "message_stop"},
    ]


def test_messages_usage_shows_cached_tokens_apart_where_the_server_shows_them(checkpoint):
    with serving(checkpoint, enable_prompt_tokens_details=True) as api:
        usage = answer(api)["usage"]
        assert usage["cache_read_input_tokens"] == 1
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] == len(api.engine.requests[-1].prompt_token_ids) - 1


def test_messages_stop_reasons_are_those_of_anthropic(api):
    stopped = answer(api, stop_sequences=["world"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "world")
    assert stopped["content"] == [{"type": "text", "text": "hello "}]
    cut = answer(api, max_tokens=1)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    api.engine.script = lambda request: iter([Chunk(request_id=request.request_id, finish_reason=FinishReason.ABORT)])
    assert answer(api)["stop_reason"] is None


def test_messages_parameters_reach_the_engine(api):
    answer(api, temperature=0.25, top_p=0.5, top_k=3, max_tokens=4)
    (request,) = api.engine.requests
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.25, 0.5, 3)
    assert request.stopping.max_tokens == 4


def test_messages_system_comes_first(api):
    expected = "<|im_start|>system\nbe brief<|im_end|>\n" + PROMPT
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
    for system in ("be brief", [billing, {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]):
        answer(api, system=system, max_tokens=1)
        assert prompt_of(api) == expected
    answer(api, system=[billing], max_tokens=1)
    assert prompt_of(api) == PROMPT


def test_messages_history_with_tools_reaches_the_template(checkpoint, tmp_path):
    thinking = {"type": "thinking", "thinking": "well", "signature": "s"}
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": texts},
        {"role": "assistant", "content": [thinking, {"type": "redacted_thinking", "data": "x"}, *texts, USE]},
        {"role": "user", "content": [RESULT, RESULT | {"content": texts, "is_error": True}, *texts]},
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
        {"role": "system", "content": "hurry"},
        {"role": "user", "content": "go on"},
    ]
    (tmp_path / "template.jinja").write_text(SHOW_ALL)
    with serving(checkpoint, chat_template=str(tmp_path / "template.jinja")) as api:
        api.join(max_model_len=2048)
        answer(api, *messages, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=1)
        *shown, tools = map(json.loads, prompt_of(api).split("\n"))
    calls = [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert shown == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "ab",
            **dict.fromkeys(["reasoning", "reasoning_content", "thinking"], "well"),
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "t1", "name": "f", "content": "one"},
        {"role": "tool", "tool_call_id": "t1", "name": "f", "content": "a\nb"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "name": "f", "content": ""},
        {"role": "system", "content": "hurry"},
        {"role": "user", "content": "go on"},
    ]
    function = {"name": "f", "description": "does it", "parameters": {"type": "object"}}
    assert tools == [{"type": "function", "function": function}]


def test_messages_beginning_of_the_answer_is_continued(api):
    answer(api, USER, {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}, max_tokens=1)
    assert prompt_of(api).endswith("<|im_start|>assistant\nhi")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": []}, "`messages`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "`messages[0].role` must be user"),
        ({"messages": [{"role": "user"}]}, "`messages[0].content` must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "`messages[0].content[0].type` is 'image'"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "`messages[0].content[0].type` is 'tool_use'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "`messages[0].content[0].text` is missing"),
        (
            {"messages": [USER, {"role": "assistant", "content": [USE | {"input": 5}]}]},
            "`messages[1].content[0].input` must be an object",
        ),
        (
            {"messages": [{"role": "user", "content": [RESULT | {"content": [{"type": "image"}]}]}]},
            "`messages[0].content[0].content[0].type` is 'image'",
        ),
        ({"messages": [USER | {"content": "hello " * 100}]}, "tokens"),
        ({"messages": [{}] * 65}, "65 messages have more tokens"),
        ({"max_tokens": None}, "`max_tokens`"),
        ({"max_tokens": 0}, "must be at least 1"),
        ({"system": [{"type": "image"}]}, "`system[0].type` is 'image'"),
        ({"stop_sequences": "x"}, "`stop_sequences`"),
        ({"stop": ["x"]}, "call it `stop_sequences`"),
        ({"tools": [TOOL]}, "does not support tool calls (`tools`)"),
        ({"tool_choice": {"type": "any"}}, "`tool_choice` asks for a call, but the request has no `tools`"),
        ({"tool_choice": {"type": "some"}}, "`tool_choice.type`"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "`tool_choice.name` is 'g'"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "`tools[0].type` is 'web_search_20250305'",
        ),
        ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "`tools[0].input_schema`"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "(`thinking`)"),
        (
            {"output_config": {"format": {"type": "json_object"}}},
            "`output_config.format.type`: not a supported value; supported: json_schema; and",
        ),
        ({"structured_outputs": {"regex": "a"}}, "(`structured_outputs`)"),
        ({"thinking_token_budget": 5}, "call it `thinking.budget_tokens`"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "needs the `name` of one of the `tools`"),
        ({"mcp_servers": [{}]}, "(`mcp_servers`)"),
    ],
)
def test_messages_wrong_field_is_refused_in_the_form_of_anthropic(api, body, text):
    response = send(api, **body)
    assert response.status_code == 400
    page = response.json()
    assert (page["type"], page["error"]["type"]) == ("error", "invalid_request_error")
    assert text in page["error"]["message"]
    assert not api.engine.requests


def test_messages_fields_without_effect_are_accepted(api):
    body = {
        "metadata": {"user_id": "me"},
        "thinking": {"type": "disabled"},
        "tools": [],
        "tool_choice": {"type": "auto"},
    }
    body |= {"service_tier": "auto", "cache_control": {"type": "ephemeral"}, "output_config": {"effort": "low"}}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    response = api.post(f"{PATH}?beta=true", {"messages": [USER], "max_tokens": 1, **body}, headers=headers)
    assert response.status_code == 200, response.text
    assert "x-eagleray-ignored" not in response.headers


def test_messages_errors_have_the_statuses_of_anthropic(checkpoint):
    with serving(checkpoint, api_key=["one"]) as api:
        key = {"x-api-key": "one"}

        def error(**arguments):
            response = api.post(PATH, {"messages": [USER], "max_tokens": 1, "model": "gpt"}, **arguments)
            return response.status_code, response.json()["error"]["type"]

        assert error() == (401, "authentication_error")
        assert error(headers=key) == (404, "not_found_error")
        response = api.get(PATH, headers=key)
        assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")
        api.leave("it crashed")
        response = api.post(PATH, {"messages": [USER], "max_tokens": 1}, headers=key)
        assert (response.status_code, response.json()["error"]["type"]) == (529, "overloaded_error")
        assert "retry-after" in response.headers


def test_messages_failure_after_the_first_event_ends_the_stream(api):
    async def fail():
        api.engine.script = None
        call = Call(api.app, PATH, {"messages": [USER], "max_tokens": 5, "stream": True})
        await settle()
        (request,) = api.engine.requests
        api.engine.deliver(Chunk(request_id=request.request_id, token_ids=[api.speech[0]]))
        await settle()
        api.engine.deliver(Chunk(request_id=request.request_id, finish_reason=FinishReason.ERROR, error="row 3"))
        await asyncio.wait_for(call.task, 5)
        return call.text

    *_, delta, error = named_events(api.run(fail()))
    assert delta["type"] == "content_block_delta"
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert "row 3" in error["error"]["message"]


def test_count_tokens_equals_the_prompt(checkpoint):
    with serving(checkpoint) as api:
        body = {"system": "be brief", "tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 5}}
        response = api.post(f"{PATH}/count_tokens", {"model": "tiny", "messages": [USER], **body})
        assert response.status_code == 200, response.text
        answer(api, system="be brief", max_tokens=1)
        assert response.json() == {"input_tokens": len(api.engine.requests[-1].prompt_token_ids)}


def test_count_tokens_wrong_body_is_refused_in_the_form_of_anthropic(api):
    response = api.post(f"{PATH}/count_tokens", {"messages": [{"role": "user", "content": [{"type": "image"}]}]})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "`messages[0].content[0].type`" in response.json()["error"]["message"]


def test_openapi_messages_routes_have_the_errors_of_anthropic(api):
    paths = api.get("/openapi.json").json()["paths"]
    responses = paths[PATH]["post"]["responses"]
    assert {"200", "400", "404", "413", "429", "500", "504", "529"} <= responses.keys()
    assert "503" not in responses
    for path in (PATH, f"{PATH}/count_tokens"):
        schema = paths[path]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/AnthropicErrorEvent"}
