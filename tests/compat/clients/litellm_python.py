"""litellm: its two providers for such servers, streams, and the exception for prompts that are too long."""

from __future__ import annotations

import json

import litellm
from checking import (
    MODEL,
    URL,
    check,
    expect,
    expect_chat_answer,
    expect_raises,
    expect_texts,
    join_chat_events,
    run_checks,
)

litellm.telemetry = False
QUESTION = [{"role": "user", "content": "What is a list?"}]


def complete(provider="hosted_vllm", **fields):
    return litellm.completion(
        **(
            {
                "model": f"{provider}/{MODEL}",
                "api_base": f"{URL}/v1",
                "api_key": "none",
                "messages": QUESTION,
                "max_tokens": 8,
                "num_retries": 0,
                "timeout": 120,
            }
            | fields
        )
    )


@check("completion by openai/")
def openai_provider():
    expect_texts([complete("openai").choices[0].message.content])


@check("completion by hosted_vllm/")
def vllm_provider():
    expect_chat_answer(complete(), max_tokens=8)


@check("stream with usage")
def stream():
    events = list(complete(stream=True, stream_options={"include_usage": True}, max_tokens=16))
    expect_texts([join_chat_events(events)])
    expect(any(getattr(event, "usage", None) for event in events), "no usage")


@check("text completion")
def text_completion():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=f"{URL}/v1",
        api_key="none",
        prompt="def main():",
        max_tokens=8,
    )
    expect_texts([answer.choices[0].text])


@check("reasoning_effort")
def reasoning_effort():
    expect_texts([complete(reasoning_effort="low").choices[0].message.content])


@check("prompt that is too long")
def too_long():
    long = [{"role": "user", "content": "word " * 5000}]
    expect_raises(litellm.ContextWindowExceededError, lambda: complete(messages=long))


@check("responses")
def responses():
    answer = litellm.responses(
        model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", input="What is a list?", max_output_tokens=16
    )
    expect(answer.output, "no output", answer)


@check("response_format json_object")
def json_object():
    expect_texts([complete(response_format={"type": "json_object"}).choices[0].message.content])


@check("tools")
def tools():
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "additionalProperties": False}},
    }
    message = complete(tools=[tool], tool_choice="required", max_tokens=200, temperature=0).choices[0].message
    call = message.tool_calls[0].function  # further ones may follow, until max_tokens
    expect(call.name == "f" and isinstance(json.loads(call.arguments), dict), "call", call)


if __name__ == "__main__":
    run_checks()
