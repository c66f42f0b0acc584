"""/v1/responses, with the types of OpenAI's client."""

from __future__ import annotations

import asyncio
import json

import pytest
from openai.types.responses import InputTokenCountResponse, Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server_fakes import SPEECH, Call, Chunk, FinishReason, serving, settle

from eagleray.identity import EngineId

PATH = "/v1/responses"
COUNT_PATH = f"{PATH}/input_tokens"
EVENT = TypeAdapter(ResponseStreamEvent)
PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
OPENING = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
ENDING = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "one"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SHOW_ALL = "{% for message in messages %}{{ message | tojson }}\n{% endfor %}{{ tools | tojson }}"


def respond(api, given="hello", **body):
    response = api.post(PATH, {"input": given, **body})
    assert response.status_code == 200, response.text
    return Response.model_validate(response.json(), strict=True)


def named_events(text):
    """Return the events of a stream of named events, which has no end mark."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def stream(api, **body):
    response = api.post(PATH, {"input": "hello", "stream": True, **body})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [EVENT.validate_python(event) for event in named_events(response.text)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    return events


def prompt_of(api):
    return api.client.tokenizer.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def messages_of(checkpoint, tmp_path, body):
    """Return the messages and tools that the chat template gets."""
    (tmp_path / "template.jinja").write_text(SHOW_ALL)
    with serving(checkpoint, chat_template=str(tmp_path / "template.jinja")) as api:
        api.join(max_model_len=2048)
        respond(api, body.pop("input"), max_output_tokens=1, **body)
        *messages, tools = map(json.loads, prompt_of(api).split("\n"))
        return messages, tools


def test_responses_whole_answer_has_output_and_usage(api):
    answer = api.post(PATH, {"input": "hello", "model": "tiny"}, headers={"X-Request-Id": "mine"}).json()
    assert prompt_of(api) == PROMPT
    num_prompt = len(api.engine.requests[-1].prompt_token_ids)
    assert answer.pop("created_at") <= answer.pop("completed_at")
    assert answer == {
        "id": "resp_mine",
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": 64 - num_prompt,
        "max_tool_calls": None,
        "model": "tiny",
        "output": [
            {
                "id": "msg_mine",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": SPEECH, "annotations": [], "logprobs": []}],
            }
        ],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
            "output_tokens": len(api.speech) + 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + len(api.speech) + 1,
        },
        "user": None,
        "metadata": {},
    }


def test_responses_parameters_reach_the_engine_and_the_answer(api):
    given = {"temperature": 0.25, "top_p": 0.5, "metadata": {"a": "b"}, "user": "me", "parallel_tool_calls": False}
    given |= {"presence_penalty": 0.5, "frequency_penalty": 1.5, "max_output_tokens": 3}
    answer = api.post(PATH, {"input": "hello", "seed": 5, "top_k": 3, **given}).json()
    assert {name: answer[name] for name in given} == given
    (request,) = api.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.25, 0.5, 3, 5)
    assert request.stopping.max_tokens == 3
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["completed_at"] is None


def test_responses_stop_ends_the_text(api):
    assert respond(api, stop="world").output_text == "hello "
    assert respond(api, stop=["world"], include_stop_str_in_output=True).output_text == "hello world"


def test_responses_stream_events_come_in_order(api):
    events = stream(api, max_output_tokens=2)
    deltas = ["response.output_text.delta"] * 2
    assert [event.type for event in events] == [*OPENING, *deltas, *ENDING, "response.incomplete"]
    created, _, added, part, first, second, text, part_done, item_done, last = events
    assert (created.response.status, created.response.output, created.response.usage) == ("in_progress", [], None)
    assert (added.item.status, added.item.content, part.part.text) == ("in_progress", [], "")
    assert (first.delta, second.delta) == ("hello", " world")
    assert text.text == part_done.part.text == item_done.item.content[0].text == "hello world"
    assert {event.item_id for event in (part, first, second, text, part_done)} == {added.item.id}
    assert last.response.output == [item_done.item]
    assert last.response.id == created.response.id
    assert last.response.usage.output_tokens == 2


def test_responses_stream_ends_with_the_whole_answer(api):
    whole, *_, last = respond(api), *stream(api)
    assert last.type == "response.completed"
    assert last.response.output_text == whole.output_text == SPEECH
    assert last.response.usage == whole.usage


def test_responses_stream_without_text_has_no_delta(api):
    api.speech = []
    assert [event.type for event in stream(api)] == [*OPENING, *ENDING, "response.completed"]
    assert respond(api).output_text == ""


def test_responses_logprobs_of_a_stream_equal_those_of_the_whole(api):
    whole = respond(api, **LOGPROBS).output[0].content[0].logprobs
    assert len(whole) == len(api.speech) + 1
    assert [(one.logprob, len(one.top_logprobs)) for one in whole] == [(-1.5, 1)] * len(whole)
    events = stream(api, **LOGPROBS)
    deltas = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.token for one in deltas] == [one.token for one in whole]
    assert events[-1].response.output[0].content[0].logprobs == whole
    assert [one.token for one in events[-4].logprobs] == [one.token for one in whole]
    assert respond(api, top_logprobs=1).output[0].content[0].logprobs == []


def test_responses_instructions_come_first(api):
    respond(api, [{"role": "user", "content": "hello"}], instructions="be brief", max_output_tokens=1)
    assert prompt_of(api) == "<|im_start|>system\nbe brief<|im_end|>\n" + PROMPT


def test_responses_history_with_calls_reaches_the_template(checkpoint, tmp_path):
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "short"}]}
    said = {"type": "output_text", "text": "calling", "annotations": []}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        thought | {"content": [{"type": "reasoning_text", "text": "long"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [said]},
        CALL | {"id": "fc_1", "status": "completed"},
        CALL | {"call_id": "c2"},
        OUTPUT,
        OUTPUT | {"call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        thought,
        CALL,
        OUTPUT,
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        thought,
        {"role": "developer", "content": "go on"},
    ]
    messages, tools = messages_of(checkpoint, tmp_path, {"input": items, "tools": [TOOL], "tool_choice": "none"})
    function = {"name": "f", "arguments": {"a": 1}}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")]
    long, short = (dict.fromkeys(["reasoning", "reasoning_content", "thinking"], text) for text in ("long", "short"))
    assert messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "calling", "tool_calls": calls, **long},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "name": "f", "content": "two"},
        {"role": "assistant", "content": "", "tool_calls": calls[:1], **short},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "one"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "", **short},
        {"role": "system", "content": "go on"},
    ]
    assert tools == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def test_responses_unfinished_last_message_is_continued(api):
    items = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi", "status": "incomplete"}]
    respond(api, items, max_output_tokens=1)
    assert prompt_of(api).endswith("<|im_start|>assistant\nhi")
    respond(api, [items[0], items[1] | {"status": "completed"}], max_output_tokens=1)
    assert prompt_of(api).endswith("hi<|im_end|>\n<|im_start|>assistant\n")


def test_responses_truncation_auto_keeps_the_end_of_the_prompt(api):
    text = "hello " * 100 + "again"
    answer = respond(api, text, truncation="auto", max_output_tokens=4)
    assert answer.truncation == "auto"
    assert len(api.engine.requests[-1].prompt_token_ids) == 64 - 4
    assert prompt_of(api).endswith("hello again<|im_end|>\n<|im_start|>assistant\n")


def test_responses_request_id_names_the_answer(api):
    assert respond(api, request_id="mine").id == "resp_mine"
    assert respond(api, request_id="resp_mine").id == "resp_mine"


def test_responses_effort_reaches_the_template(api):
    answer = respond(api, reasoning={"effort": "low", "summary": "auto"}, chat_template_kwargs={"mood": "glad "})
    assert prompt_of(api) == PROMPT + "glad "
    assert (answer.reasoning.effort, answer.reasoning.summary) == ("low", "auto")


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"input": []}, "input", "length"),
        ({"input": [5]}, "input[0]", "object"),
        ({"input": [{}]}, "input[0].role", "one of user, assistant"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "one of user, assistant"),
        ({"input": [{"role": "user"}]}, "input[0].content", "a list of parts"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0].type", "only texts"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "only texts"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "missing"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments", "must be a text"),
        ({"input": [OUTPUT | {"output": None}]}, "input[0].output", "a list of parts"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary", "a list of parts"),
        ({"input": "hello " * 100}, "input", "tokens"),
        ({"input": [{}] * 65}, "input", "65 messages have more tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"metadata": {"a": 1}}, "metadata[...]", "str"),
        ({"tools": [TOOL]}, "tools", "tool calls"),
        ({"tool_choice": "required"}, "tool_choice", "no `tools`"),
        ({"tool_choice": ""}, "tool_choice", "must be none, auto"),
        ({"text": {"format": {"type": "json"}}}, "text.format.type", "json_object"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "needs a `schema`"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "send the whole conversation"),
        ({"background": True}, "background", "in the background"),
        ({"truncation": "middle"}, "truncation", "auto, disabled"),
        ({"prompt": {"id": "x"}}, "prompt", "templates"),
        ({"messages": [{}]}, "messages", "call it `input`"),
        ({"n": 2}, "n", "several answers"),
    ],
)
def test_responses_wrong_field_is_refused_by_name(api, body, param, text):
    response = api.post(PATH, {"input": "hello", **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert text in error["message"]
    assert not api.engine.requests


def test_responses_fields_without_effect_are_accepted(api):
    body = {"truncation": "disabled", "background": False, "text": {"format": {"type": "text"}, "verbosity": "low"}}
    body |= {"include": ["reasoning.encrypted_content"], "store": False, "service_tier": "auto", "max_tool_calls": 3}
    body |= {"prompt_cache_key": "x", "tools": [], "tool_choice": "auto", "stream_options": {}, "n": 1}
    body |= dict.fromkeys(["previous_response_id", "conversation", "prompt", "reasoning", "temperature"])
    response = api.post(PATH, {"input": "hello", **body})
    assert response.status_code == 200, response.text
    assert "x-eagleray-ignored" not in response.headers
    assert api.post(PATH, {"input": "hello", "store": True}).headers["x-eagleray-ignored"] == "store"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
)
def test_responses_kept_answer_is_not_found(api, method, path):
    response = api.request(method, f"{PATH}/resp_1{path}")
    assert response.status_code == 404
    assert "does not keep answers" in response.json()["error"]["message"]


def test_responses_failure_after_the_first_event_ends_the_stream(checkpoint):
    async def fail(api):
        call = Call(api.app, PATH, {"input": "hello", "stream": True})
        await settle()
        (request,) = api.engine.requests
        api.engine.deliver(Chunk(request_id=request.request_id, token_ids=[api.speech[0]]))
        await settle()
        api.engine.deliver(Chunk(request_id=request.request_id, token_ids=[], finish_reason=FinishReason.ERROR))
        await asyncio.wait_for(call.task, 5)
        return call.text

    with serving(checkpoint) as api:
        api.engine.script = None
        events = [EVENT.validate_python(event) for event in named_events(api.run(fail(api)))]
    assert [event.type for event in events] == [*OPENING, "response.output_text.delta", "response.failed"]
    assert [event.sequence_number for event in events] == [*range(6)]
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.message


def test_responses_aborted_answer_is_cancelled(api):
    def abort(request):
        yield Chunk(request_id=request.request_id, token_ids=[api.speech[0]])
        yield Chunk(request_id=request.request_id, token_ids=[], finish_reason=FinishReason.ABORT)

    api.engine.script = abort
    assert respond(api).status == "cancelled"
    assert stream(api)[-1].type == "response.incomplete"


def test_responses_failure_before_the_first_event_is_an_ordinary_answer(api):
    api.leave("it crashed", EngineId("test", 0))
    response = api.post(PATH, {"input": "hello", "stream": True})
    assert response.status_code == 503


def test_input_tokens_equal_the_prompt(api):
    body = {"input": [{"role": "user", "content": "hello"}], "instructions": "be brief", "reasoning": {"effort": "low"}}
    body |= {"chat_template_kwargs": {"mood": "glad "}, "text": {"format": {"type": "text"}}, "truncation": "auto"}
    response = api.post(COUNT_PATH, {"model": "tiny", "tools": [TOOL], "tool_choice": "required", **body})
    assert response.status_code == 200, response.text
    assert "x-eagleray-ignored" not in response.headers
    count = InputTokenCountResponse.model_validate(response.json(), strict=True)
    assert not api.engine.requests
    api.post(PATH, {"max_output_tokens": 1, **body})
    assert count.input_tokens == len(api.engine.requests[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": "hello " * 10**6}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"text": {"format": {"type": "json"}}}, "text.format.type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_input_tokens_wrong_field_is_refused_by_name(api, body, param):
    response = api.post(COUNT_PATH, {"input": "hello", **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error


def test_input_tokens_unknown_model_is_not_found(api):
    assert api.post(COUNT_PATH, {"model": "other", "input": "hello"}).status_code == 404
