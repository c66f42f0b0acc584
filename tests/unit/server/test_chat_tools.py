"""Tools on /v1/chat/completions: what constrains the answer, and the calls that are made of its text."""

from __future__ import annotations

import json

import pytest
from server_fakes import serving

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}{# <tool_call> </tool_call> #}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name, **more):
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **more}}


WEATHER, TIME = tool("weather"), tool("time")
BOTH = [WEATHER, TIME]
CALLS = (
    'Let me look. <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


@pytest.fixture
def api(shared_api):
    """An application, which has had other requests."""
    shared_api.say("hello world")
    shared_api.engine.sent.clear()
    return shared_api


def answer(api, **body):
    response = api.post(PATH, {"messages": [USER], "tools": BOTH, **body})
    assert response.status_code == 200, response.text
    return response.json()


def structural_format(api):
    """Return the constraint that reaches the engine, or None."""
    grammar = api.engine.requests[-1].sampling.grammar
    if grammar is None:
        return None
    assert grammar.kind == "structural_tag"
    return json.loads(grammar.source)["format"]


def begins(form):
    return [tag["begin"].split('"')[3] for tag in form["tags"]]


def joined(events):
    """Return the message and the finish reason that the events of a stream add up to, by choice."""
    messages, ends = {}, {}
    for event in events:
        for choice in event["choices"]:
            message = messages.setdefault(choice["index"], {"role": None, "content": None, "tool_calls": []})
            delta = choice["delta"]
            for name in ("role", "content", "reasoning"):
                if (text := delta.get(name)) is not None:
                    message[name] = (message.get(name) or "") + text
            for part in delta.get("tool_calls", []):
                if part["index"] == len(message["tool_calls"]):
                    assert part["function"]["name"] and part["id"] and part["type"] == "function"
                    message["tool_calls"].append({**part, "function": dict(part["function"])})
                else:
                    assert part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"}
                    message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
            if choice["finish_reason"] is not None:
                ends[choice["index"]] = choice["finish_reason"]
    return messages, ends


def test_chat_calls_in_the_text_become_tool_calls(api):
    api.say(CALLS)
    (choice,) = answer(api)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    weather, time = choice["message"]["tool_calls"]
    assert weather | {"id": None} == {
        "id": None,
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
    }
    assert time["function"] == {"name": "time", "arguments": '{"city": "Oslo"}'}
    assert weather["id"] and time["id"] and weather["id"] != time["id"]


def test_chat_calls_alone_leave_the_content_null(api):
    api.say(CALLS.removeprefix("Let me look. "))
    message = answer(api)["choices"][0]["message"]
    assert message["content"] is None and message["refusal"] is None
    assert len(message["tool_calls"]) == 2


def test_chat_answer_without_calls_has_no_tool_calls(api):
    api.say("No <tool> is needed.")
    (choice,) = answer(api)["choices"]
    assert choice["message"]["content"] == "No <tool> is needed."
    assert "tool_calls" not in choice["message"] and "reasoning_content" not in choice["message"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("n", [1, 2])
def test_chat_streamed_calls_join_to_the_whole_answer(api, n):
    api.say(CALLS)
    whole = answer(api, n=n)["choices"]
    messages, ends = joined(api.events(PATH, {"messages": [USER], "tools": BOTH, "n": n}))
    assert ends == dict.fromkeys(range(n), "tool_calls")
    for choice in whole:
        message = messages[choice["index"]]
        assert message["content"] == choice["message"]["content"]
        functions = [call["function"] for call in message["tool_calls"]]
        assert functions == [call["function"] for call in choice["message"]["tool_calls"]]
    ids = [call["id"] for message in messages.values() for call in message["tool_calls"]]
    assert len(set(ids)) == 2 * n


def test_chat_stream_shows_a_call_while_it_is_made(api):
    api.say(CALLS)
    deltas = [event["choices"][0]["delta"] for event in api.events(PATH, {"messages": [USER], "tools": BOTH})]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert deltas[0]["role"] == "assistant"
    assert [call["function"]["name"] for call in calls if "id" in call] == ["weather", "time"]
    assert sum(call["index"] == 0 for call in calls) > 3  # the arguments come in several pieces
    assert deltas[-1] == {}


def test_chat_call_cut_off_is_delivered_as_text(api):
    api.say('<tool_call>\n{"name": "weather", "arguments": {"city": "Par')
    body = {"max_tokens": len(api.speech)}
    (choice,) = answer(api, **body)["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Par'}
    assert choice["finish_reason"] == "length"
    messages, ends = joined(api.events(PATH, {"messages": [USER], "tools": BOTH, **body}))
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"city": "Par'
    assert ends == {0: "length"}


def test_chat_choice_auto_leaves_the_text_free(api):
    answer(api)
    assert structural_format(api) is None
    answer(api, tool_choice="auto", parallel_tool_calls=True)
    assert structural_format(api) is None


def test_chat_choice_none_reads_no_calls(api):
    api.say(CALLS)
    (choice,) = answer(api, tool_choice="none")["choices"]
    assert choice["message"]["content"] == CALLS
    assert choice["finish_reason"] == "stop"
    assert structural_format(api) is None


def test_chat_choice_required_constrains_all_text(api):
    api.say(CALLS.removeprefix("Let me look. "))
    (choice,) = answer(api, tool_choice="required")["choices"]
    form = structural_format(api)
    assert form["type"] == "tags_with_separator" and form["at_least_one"] and not form["stop_after_first"]
    assert begins(form) == ["weather", "time"]
    assert form["tags"][0]["content"]["json_schema"] == PARAMETERS
    assert choice["finish_reason"] == "tool_calls"


def test_chat_choice_of_a_function_constrains_to_it(api):
    api.say(CALLS.removeprefix("Let me look. "))
    (choice,) = answer(api, tool_choice={"type": "function", "function": {"name": "time"}})["choices"]
    form = structural_format(api)
    assert begins(form) == ["time"] and form["stop_after_first"]
    assert choice["finish_reason"] == "stop"  # as in OpenAI's API


def test_chat_choice_of_allowed_tools_hides_the_others(api):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
    answer(api, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert begins(structural_format(api)) == ["time"]
    prompt = api.client.tokenizer.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<time>user:hello;"


def test_chat_strict_tools_and_single_calls_constrain_calls_in_free_text(api):
    answer(api, tools=[tool("weather", strict=True), TIME])
    form = structural_format(api)
    assert form["type"] == "triggered_tags" and not form["stop_after_first"]
    schemas = [tag["content"]["json_schema"] for tag in form["tags"]]
    assert schemas == [PARAMETERS, {"type": "object"}]
    answer(api, parallel_tool_calls=False)
    assert structural_format(api)["stop_after_first"]


def test_chat_tools_beside_a_response_format_allow_either(api):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answer(api, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    form = structural_format(api)
    calls, content = form["elements"]
    assert form["type"] == "or" and begins(calls) == ["weather", "time"]
    assert content == {"type": "json_schema", "json_schema": schema}


@pytest.mark.parametrize(
    ("content", "form"),
    [
        ({"regex": "a+"}, {"type": "regex", "pattern": "a+"}),
        ({"choice": ["a", "b"]}, {"type": "or", "elements": [{"type": "const_string", "value": x} for x in "ab"]}),
        ({"grammar": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        ({"json": '{"type": "integer"}'}, {"type": "json_schema", "json_schema": {"type": "integer"}}),
        ({"json_object": True, "whitespace_pattern": " "}, {"type": "json_schema", "json_schema": {"type": "object"}}),
    ],
)
def test_chat_tools_beside_another_constraint_allow_either(api, content, form):
    answer(api, structured_outputs=content)
    assert structural_format(api)["elements"][1] == form
    whitespace = api.engine.requests[-1].sampling.grammar.whitespace
    assert (whitespace == " ") is ("whitespace_pattern" in content)


@pytest.mark.parametrize(
    ("level", "schemas"), [("function", [{"type": "object"}] * 2), ("parameter", [PARAMETERS, PARAMETERS])]
)
def test_tool_strict_level_constrains_calls_of_all_tools(served, level, schemas):
    with served(tool_strict_level=level) as api:
        answer(api, max_tokens=1)
        assert [tag["content"]["json_schema"] for tag in structural_format(api)["tags"]] == schemas


def test_tools_without_a_choice_of_them_can_be_left_out_of_the_prompt(served):
    for excludes, prompt in ((False, "<weather><time>user:hello;"), (True, "user:hello;")):
        with served(exclude_tools_when_tool_choice_none=excludes) as api:
            answer(api, tool_choice="none", max_tokens=1)
            shown = api.client.tokenizer.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
            assert shown == prompt


def test_chat_markers_that_are_special_tokens_are_read(template, tmp_path, checkpoint):
    special = tmp_path / "special"
    special.mkdir()
    for file in checkpoint.iterdir():
        (special / file.name).write_text(file.read_text())
    path = special / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    number = max(token["id"] for token in tokenizer["added_tokens"])
    special_token = tokenizer["added_tokens"][0]
    for content in ("<tool_call>", "</tool_call>"):
        number += 1
        tokenizer["added_tokens"].append(special_token | {"id": number, "content": content})
    path.write_text(json.dumps(tokenizer))
    with serving(special, chat_template=str(template)) as api:
        api.join(max_model_len=1024)
        api.say(f"<|im_start|>{CALLS}")
        assert number in api.speech
        message = answer(api)["choices"][0]["message"]
        assert (message["content"], len(message["tool_calls"])) == ("Let me look.", 2)
        assert answer(api, tools=None)["choices"][0]["message"]["content"].startswith('Let me look. \n{"name"')


def test_chat_batch_reads_the_calls_of_each_conversation(api):
    api.say(CALLS)
    response = api.post(f"{PATH}/batch", {"messages": [[USER], [USER]], "tools": BOTH})
    choices = response.json()["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [2, 2]
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 4


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function"),
        ({"tools": [WEATHER, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [tool("f", description=5)]}, "tools[0].function.description"),
        ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": None, "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"parallel_tool_calls": "maybe"}, "parallel_tool_calls"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ],
)
def test_chat_wrong_tools_are_refused_by_path(api, body, param):
    response = api.post(PATH, {"messages": [USER], "tools": BOTH, **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not api.engine.requests


def test_chat_schema_that_is_nested_too_deeply_is_refused(api):
    body = json.dumps({"messages": [USER], "max_tokens": 1, "tools": [tool("f", parameters={}, strict=True)]})
    params = set()
    for depth in range(400, 500, 2):  # up to beyond what is too deep for a body
        schema = '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth
        content = body.replace('"parameters": {}', f'"parameters": {schema}').encode()
        response = api.request("POST", PATH, content=content, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), response.text
        params.add(response.json().get("error", {}).get("param", "none"))
    assert {"tools", None} <= params
