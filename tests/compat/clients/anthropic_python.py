"""anthropic: messages whole and streamed, counting of tokens, exceptions."""

from __future__ import annotations

import anthropic
from checking import MODEL, URL, check, expect, expect_raises, expect_texts, run_checks

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=120.0)
QUESTION = [{"role": "user", "content": "What is a list?"}]


@check("messages")
def messages():
    answer = client.messages.create(model=MODEL, messages=QUESTION, max_tokens=8)
    expect_texts([answer.content[0].text])
    expect(answer.usage.output_tokens <= 8, "usage", answer.usage)


@check("system and blocks")
def system_and_blocks():
    blocks = [{"type": "text", "text": "What is a list?", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(
        model=MODEL, system="Be short.", messages=[{"role": "user", "content": blocks}], max_tokens=8
    )
    expect_texts([answer.content[0].text])


@check("stream")
def stream():
    with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=16) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    expect(final.content[0].text == text, "stream and message differ")
    expect(final.stop_reason in ("end_turn", "max_tokens"), "stop_reason", final.stop_reason)


@check("count_tokens")
def count_tokens():
    expect(client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens > 0, "no tokens")


@check("history with tool results")
def tool_history():
    history = [
        *QUESTION,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "2"}]},
    ]
    expect_texts([client.messages.create(model=MODEL, messages=history, max_tokens=8).content[0].text])


@check("exceptions by status")
def exceptions():
    create = client.messages.create
    expect_raises(anthropic.NotFoundError, lambda: create(model="nothing", messages=QUESTION, max_tokens=8))
    expect_raises(anthropic.BadRequestError, lambda: create(model=MODEL, messages=QUESTION, max_tokens=0))


@check("tools")
def tools():
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tool = {"name": "weather", "input_schema": schema | {"additionalProperties": False}}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    fields = {"model": MODEL, "messages": QUESTION, "max_tokens": 200, "tools": [tool], "tool_choice": choice}
    answer = client.messages.create(**fields)
    expect(answer.stop_reason == "tool_use", "stop_reason", answer.stop_reason)
    expect([block.input for block in answer.content if block.type == "tool_use"] == [{"city": "Rome"}], "input", answer)
    with client.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    expect([block.input for block in final.content if block.type == "tool_use"] == [{"city": "Rome"}], "stream", final)


if __name__ == "__main__":
    run_checks()
