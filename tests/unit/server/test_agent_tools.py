"""Tools on /v1/responses and /v1/messages: what constrains the answer, and the items and blocks that are made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server_fakes import Chunk, FinishReason, serving

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hello"}
EVENT = TypeAdapter(ResponseStreamEvent)
TEMPLATE = "{% for message in messages %}{{ message.content }};{% endfor %}{# <tool_call> </tool_call> #}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMES = ("weather", "time")
FUNCTIONS = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
TOOLS = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
NESTED = [{"type": "function", "function": tool} for tool in FUNCTIONS]
KNOWN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "tools": NESTED},
    RESPONSES: {"input": "hello", "tools": FUNCTIONS},
    MESSAGES: {"messages": [USER], "tools": TOOLS, "max_tokens": 500},
}
CALLS = [f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Oslo"}}}}\n</tool_call>' for name in NAMES]


@pytest.fixture
def api(shared_api):
    """An application, which has had other requests."""
    shared_api.say("\n".join(["Let me look.", *CALLS]))
    return shared_api


def post(api, path, **body):
    response = api.post(path, {**KNOWN[path], **body})
    assert response.status_code == 200, response.text
    return response


def events(api, path, **body):
    blocks = post(api, path, stream=True, **body).text.strip().split("\n\n")
    return [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]


def structural_format(api):
    grammar = api.engine.requests[-1].sampling.grammar
    return None if grammar is None else json.loads(grammar.source)["format"]


def test_responses_calls_are_items(api):
    answer = Response.model_validate(post(api, RESPONSES).json(), strict=True)
    message, weather, time = answer.output
    assert message.content[0].text == answer.output_text == "Let me look."
    assert (weather.type, weather.name, weather.arguments) == ("function_call", "weather", '{"city": "Oslo"}')
    assert time.name == "time" and len({weather.call_id, time.call_id}) == len({weather.id, time.id}) == 2
    assert {item.status for item in answer.output} == {"completed"}


def test_responses_stream_has_the_events_of_calls_in_order(api):
    found = [EVENT.validate_python(event) for event in events(api, RESPONSES)]
    assert [event.sequence_number for event in found] == [*range(len(found))]
    kinds = [event.type.removeprefix("response.") for event in found if not event.type.endswith(".delta")]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    message = ["output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *message, *call, *call, "completed"]
    items = found[-1].response.output
    assert [event.item for event in found if event.type == "response.output_item.done"] == items
    for index, item in enumerate(items):
        named = [event for event in found if getattr(event, "item_id", None) == item.id]
        assert {event.output_index for event in named} == {index}
        pieces = [event.delta for event in named if event.type.endswith(".delta")]
        assert "".join(pieces) == (item.arguments if item.type == "function_call" else "Let me look.")
    starts = [event.item for event in found if event.type == "response.output_item.added"]
    assert [getattr(item, "arguments", "") for item in starts] == ["", "", ""]


def test_responses_logprobs_are_those_of_the_text(api):
    fields = {"include": ["message.output_text.logprobs"]}
    (message, *_) = post(api, RESPONSES, **fields).json()["output"]
    (streamed, *_) = events(api, RESPONSES, **fields)[-1]["response"]["output"]
    logprobs = message["content"][0]["logprobs"]
    assert "".join(one["token"] for one in logprobs) == "Let me look."
    assert streamed["content"][0]["logprobs"] == logprobs


def test_responses_cut_off_call_is_incomplete(api):
    api.say(CALLS[0][:-20])
    answer = post(api, RESPONSES, max_output_tokens=len(api.speech)).json()
    (call,) = answer["output"]
    assert (answer["status"], call["status"], call["name"]) == ("incomplete", "incomplete", "weather")
    assert '{"city": "Oslo"}'.startswith(call["arguments"])


@pytest.mark.parametrize(
    ("path", "choice", "names", "ends"),
    [
        (RESPONSES, {"tool_choice": "required"}, ["weather", "time"], False),
        (RESPONSES, {"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "time"], True),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "time"}}, ["time"], True),
        (MESSAGES, {"tool_choice": {"type": "any"}}, ["weather", "time"], False),
        (MESSAGES, {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, ["weather", "time"], True),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "time"}}, ["time"], True),
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ["weather", "time"], True),
    ],
)
def test_agent_routes_constrain_the_calls_of_a_choice(api, path, choice, names, ends):
    post(api, path, **choice)
    form = structural_format(api)
    assert [tag["begin"].split('"')[3] for tag in form["tags"]] == names
    schema = {RESPONSES: "parameters", MESSAGES: "input_schema"}[path]
    fields = [f"tools[{NAMES.index(name)}].{schema}" for name in names]
    assert [tag["content"].get("param", "") for tag in form["tags"]] == fields
    assert form["stop_after_first"] is ends


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_agent_routes_without_a_choice_leave_the_text_free(api, path):
    post(api, path)
    assert structural_format(api) is None


def test_responses_allowed_tools_leave_out_the_others(api):
    allowed = [{"type": "function", "name": "time"}]
    post(api, RESPONSES, tool_choice={"type": "allowed_tools", "mode": "required", "tools": allowed})
    assert len(structural_format(api)["tags"]) == 1


def test_agent_routes_constrain_the_form_of_texts(api):
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    answer = post(api, RESPONSES, tools=None, text={"format": form}).json()
    assert answer["text"]["format"] == form
    assert json.loads(api.engine.requests[-1].sampling.grammar.source) == SCHEMA
    post(api, MESSAGES, tools=None, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert json.loads(api.engine.requests[-1].sampling.grammar.source) == SCHEMA
    post(api, RESPONSES, tools=None, text={"format": {"type": "json_object"}})
    assert api.engine.requests[-1].sampling.grammar.kind == "json_schema"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESPONSES, {"text": {"format": {"type": "json_object"}}, "tools": None}, "text.format"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
        (RESPONSES, {"structured_outputs": {"json_object": True}}, "structured_outputs"),
        (RESPONSES, {"tool_choice": "required"}, "tools"),
        (CHAT, {"response_format": {"type": "text"}, "tool_choice": "required"}, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tools"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    ],
)
def test_routes_name_the_field_of_a_constraint_that_engines_refuse(api, path, body, param):
    refusal = {"finish_reason": FinishReason.ERROR, "error": "too odd", "is_user_error": True}
    script, api.engine.script = (
        api.engine.script,
        lambda request: iter([Chunk(request_id=request.request_id, param="structured_outputs", **refusal)]),
    )
    try:
        response = api.post(path, {**KNOWN[path], **body})
    finally:
        api.engine.script = script
    error = response.json()["error"]
    assert response.status_code == 400
    if path == MESSAGES:
        assert error["message"] == f"`{param}`: too odd"
    else:
        assert error["param"] == param


def test_messages_calls_are_blocks(api):
    answer = post(api, MESSAGES).json()
    text, weather, time = answer["content"]
    assert text == {"type": "text", "text": "Let me look."}
    assert weather | {"id": None} == {"type": "tool_use", "id": None, "name": "weather", "input": {"city": "Oslo"}}
    assert time["name"] == "time" and time["id"] != weather["id"]
    assert answer["stop_reason"] == "tool_use"


def test_messages_stream_has_the_events_of_calls_in_order(api):
    start, ping, *found, end, stop = events(api, MESSAGES)
    assert [event["type"] for event in (start, ping, stop)] == ["message_start", "ping", "message_stop"]
    assert end["delta"]["stop_reason"] == "tool_use"
    blocks, index = [], -1
    for event in found:
        match event["type"]:
            case "content_block_start":
                blocks.append({**event["content_block"], "pieces": []})
                index += 1
            case "content_block_delta":
                assert event["delta"]["type"] == ("text_delta" if index == 0 else "input_json_delta")
                blocks[-1]["pieces"].append(event["delta"].get("text", event["delta"].get("partial_json")))
        assert event["index"] == index
    text, weather, time = blocks
    assert (text["text"], "".join(text["pieces"])) == ("", "Let me look.")
    assert (weather["name"], weather["input"], "".join(weather["pieces"])) == ("weather", {}, '{"city": "Oslo"}')
    assert len(time["pieces"]) > 3


def test_messages_broken_input_is_delivered_as_text(api):
    api.say(CALLS[0][:-20])
    answer = post(api, MESSAGES, max_tokens=len(api.speech)).json()
    ((name, text),) = answer["content"][0]["input"].items()
    assert name == "INVALID_JSON" and '{"city": "Oslo"}'.startswith(text)
    assert answer["stop_reason"] == "max_tokens"


ANSWERS = {
    ("hermes", "qwen3"): "<think>well</think>Look <tool_call>{CALL}</tool_call>",
    ("mistral", "mistral"): "[THINK]well[/THINK]Look[TOOL_CALLS]weather[ARGS]{ARGS}",
    ("kimi_k2", "kimi_k2"): "<think>well</think>Look<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    "<|tool_call_argument_begin|>{ARGS}<|tool_call_end|><|tool_calls_section_end|>",
    ("openai", "openai_gptoss"): "<|channel|>analysis<|message|>well<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>Look<|end|><|start|>assistant<|channel|>commentary to=functions.weather<|message|>{ARGS}",
}


@pytest.mark.parametrize("formats", ANSWERS, ids="-".join)
def test_all_routes_divide_an_answer_alike(checkpoint, formats):
    arguments = '{"city": "Oslo"}'
    call = f'{{"name": "weather", "arguments": {arguments}}}'
    tools, reasoning = formats
    with serving(checkpoint, tool_call_parser=tools, reasoning_parser=reasoning) as api:
        api.join(max_model_len=1024)
        api.say(ANSWERS[formats].replace("{CALL}", call).replace("{ARGS}", arguments))
        chat_tools = [{"type": "function", "function": {"name": name}} for name in NAMES]
        body = {"messages": [{"role": "user", "content": "hello"}], "tools": chat_tools}
        message = api.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        (made,) = message["tool_calls"]
        assert (message["reasoning"], message["content"].strip()) == ("well", "Look")
        assert made["function"] == {"name": "weather", "arguments": arguments}
        assert (made["id"] == "functions.weather:0") is (tools == "kimi_k2")
        thought, text, called = post(api, RESPONSES).json()["output"]
        assert (thought["content"][0]["text"], text["content"][0]["text"].strip()) == ("well", "Look")
        assert (called["name"], called["arguments"]) == ("weather", arguments)
        thinking, text, use = post(api, MESSAGES).json()["content"]
        assert (thinking["thinking"], text["text"].strip()) == ("well", "Look")
        assert (use["name"], use["input"]) == ("weather", {"city": "Oslo"})
