"""openai-python: every call of the client that a server without tools can answer, and its exceptions."""

from __future__ import annotations

import asyncio
import base64

import openai
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
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120.0)
QUESTION = [{"role": "user", "content": "What is a list?"}]
PROMPT = "def main():"


def chat(**fields):
    return client.chat.completions.create(
        **({"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0} | fields)
    )


def complete(**fields):
    return client.completions.create(**({"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0} | fields))


@check("models")
def models():
    expect(MODEL in [model.id for model in client.models.list()], "the model is not in the list")
    expect(client.models.retrieve(MODEL).id == MODEL, "another model")


@check("chat")
def chat_answers():
    expect_chat_answer(chat(), max_tokens=8)


@check("chat stream")
def chat_stream():
    whole = chat().choices[0].message.content
    events = list(chat(stream=True, stream_options={"include_usage": True}))
    text = join_chat_events(events)
    expect(text == whole, "stream and answer differ:", text, whole)
    expect(events[-1].usage.completion_tokens == 8, "usage of the stream:", events[-1].usage)


@check("chat stream helper")
def chat_stream_helper():
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, max_tokens=8) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        message = stream.current_completion_snapshot.choices[0].message
    expect(text and message.content == text, "parts and answer differ:", text, message.content)


@check("chat logprobs")
def chat_logprobs():
    answer = chat(logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    expect(len(content) == answer.usage.completion_tokens, "number of log-probabilities", len(content))
    expect(all(len(entry.top_logprobs) == 3 for entry in content), "not three alternatives each")
    expect(content[0].logprob == max(top.logprob for top in content[0].top_logprobs), "greedy is not the likeliest")


@check("completion")
def completion():
    expect_texts([complete().choices[0].text])


@check("completion stream")
def completion_stream():
    text = "".join(event.choices[0].text for event in complete(stream=True))
    expect(text == complete().choices[0].text, "stream and answer differ")


@check("completion logprobs and echo")
def completion_echo():
    choice = complete(echo=True, logprobs=2).choices[0]
    expect(choice.text.startswith(PROMPT), "the prompt is not there", choice.text)
    expect("".join(choice.logprobs.tokens) == choice.text, "tokens are not the text")
    expect(choice.logprobs.token_logprobs[0] is None, "the first token has a log-probability")
    expect(choice.logprobs.text_offset[0] == 0, "first offset", choice.logprobs.text_offset[0])


@check("several prompts, token ids, n")
def several():
    expect([c.index for c in complete(prompt=["a", "b"], n=2, temperature=1).choices] == [0, 1, 2, 3], "indexes")
    expect_texts([c.text for c in complete(prompt=[[5, 6, 7], [8, 9]]).choices])
    expect(len(chat(n=3, temperature=1).choices) == 3, "not three choices")


@check("seed")
def seed():
    texts = {complete(seed=7, temperature=1.0).choices[0].text for _ in range(3)}
    expect(len(texts) == 1, "one seed, several texts", texts)


@check("stop")
def stop():
    text = complete(max_tokens=16).choices[0].text
    word = text.strip()[1:3] if len(text.strip()) > 3 else text
    choice = complete(max_tokens=16, stop=[word]).choices[0]
    expect(choice.finish_reason == "stop" and word not in choice.text, "not stopped at", word, choice.text)


@check("keys that nobody asked for")
def keys():
    choice = complete().choices[0]
    expect(choice.prompt_logprobs is None, "prompt_logprobs", choice.prompt_logprobs)


@check("raw headers")
def raw_headers():
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION, max_tokens=1)
    expect(raw.headers.get("content-type", "").startswith("application/json"), "content type", dict(raw.headers))
    expect_texts([raw.parse().id])


@check("unknown field is named in a header")
def unknown_field():
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, max_tokens=1, extra_body={"no_such_field": 1}
    )
    expect(raw.headers.get("x-eagleray-ignored") == "no_such_field", "header", dict(raw.headers))


@check("64 parallel streams")
def parallel_streams():
    texts = asyncio.run(stream_all(64))
    expect(len(set(texts)) == 1, "greedy streams differ", set(texts))


async def stream_all(count: int) -> list[str]:
    """Return the texts of streams that run at the same time."""
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=240.0) as parallel:

        async def one() -> str:
            stream = await parallel.chat.completions.create(
                model=MODEL, messages=QUESTION, max_tokens=16, temperature=0, stream=True
            )
            return "".join([event.choices[0].delta.content or "" async for event in stream])

        return await asyncio.gather(*(one() for _ in range(count)))


@check("early close")
def early_close():
    for _ in range(20):
        with complete(max_tokens=500, stream=True, extra_body={"ignore_eos": True}) as stream:
            next(iter(stream))
    expect_texts([complete().choices[0].text])


@check("exceptions by status")
def exceptions():
    error = expect_raises(openai.NotFoundError, lambda: complete(model="nothing"))
    expect(MODEL in str(error), "the served model is not named:", error)
    error = expect_raises(openai.BadRequestError, lambda: complete(max_tokens=0))
    expect(error.param == "max_tokens", "param", error.param)
    expect_raises(openai.BadRequestError, lambda: complete(temperature=-1))
    with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as nowhere:
        expect_raises(openai.APIConnectionError, nowhere.models.list)
    hasty = client.with_options(timeout=0.001)  # shares the connections, so it is not closed
    # long enough that the answer is not there before the client begins to wait for it
    long = {"max_tokens": 500, "extra_body": {"ignore_eos": True}}
    expect_raises(openai.APITimeoutError, lambda: hasty.completions.create(model=MODEL, prompt=PROMPT, **long))


@check("prompt that is too long")
def too_long():
    error = expect_raises(openai.BadRequestError, lambda: complete(prompt=[5] * 5000))
    expect(error.code == "context_length_exceeded", "code", error.code)
    expect("maximum context length is" in str(error), "text", error)


@check("embeddings are refused with a sentence")
def embeddings():
    error = expect_raises(openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input="a"))
    expect(len(error.message) > 20, "message", error.message)


@check("responses")
def responses():
    answer = client.responses.create(model=MODEL, input="What is a list?", max_output_tokens=16, temperature=0)
    expect_texts([answer.output_text])
    expect(answer.usage.output_tokens <= 16, "usage", answer.usage)


@check("responses stream")
def responses_stream():
    with client.responses.stream(model=MODEL, input="What is a list?", max_output_tokens=300, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        expect(stream.get_final_response().output_text == text, "stream and answer differ")


@check("responses input tokens")
def responses_input_tokens():
    question = {"model": MODEL, "input": "What is a list?", "instructions": "Be short."}
    answer = client.responses.create(**question, max_output_tokens=1)
    count = client.responses.input_tokens.count(**question)
    expect(count.input_tokens == answer.usage.input_tokens, "another number of tokens:", count, answer.usage)


TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@check("history with tool calls")
def tool_history():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    expect_texts([chat(messages=messages).choices[0].message.content])


@check("tools")
def tools():
    fields = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    choice = chat(**fields).choices[0]
    expect(choice.finish_reason == "tool_calls", "finish_reason", choice.finish_reason)
    deltas = [call for event in chat(**fields, stream=True) for call in event.choices[0].delta.tool_calls or ()]
    arguments = "".join(delta.function.arguments or "" for delta in deltas)
    expect(arguments == choice.message.tool_calls[0].function.arguments, "stream and answer differ", arguments)


@check("response_format json_object")
def json_object():
    expect_texts([chat(response_format={"type": "json_object"}, max_tokens=64).choices[0].message.content])


class Answer(BaseModel):
    """Schema of a structured answer."""

    number: bool


@check("parse")
def parse():
    answer = client.chat.completions.parse(model=MODEL, messages=QUESTION, max_tokens=200, response_format=Answer)
    expect(isinstance(answer.choices[0].message.parsed, Answer), "not parsed", answer)


@check("base64 image is refused with a sentence")
def image():
    data = base64.b64encode(b"png").decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    error = expect_raises(openai.BadRequestError, lambda: chat(messages=[{"role": "user", "content": [part]}]))
    expect(len(error.message) > 20, "message", error.message)


if __name__ == "__main__":
    run_checks()
