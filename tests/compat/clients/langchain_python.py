"""langchain-openai: invoke, stream, batch, log-probabilities, history of tools."""

from __future__ import annotations

from checking import MODEL, URL, check, expect, expect_raises, expect_texts, run_checks
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

SETTINGS = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "timeout": 120}
QUESTION = "What is a list?"


def chat(**fields):
    return ChatOpenAI(**(SETTINGS | {"max_tokens": 8, "temperature": 0} | fields))


@check("invoke")
def invoke():
    answer = chat().invoke([SystemMessage("Be short."), HumanMessage(QUESTION)])
    expect_texts([answer.content])
    expect(answer.usage_metadata["output_tokens"] <= 8, "usage", answer.usage_metadata)


@check("stream")
def stream():
    text = "".join(part.content for part in chat().stream(QUESTION))
    expect(text == chat().invoke(QUESTION).content, "stream and answer differ")


@check("batch")
def batch():
    expect_texts([answer.content for answer in chat().batch([QUESTION] * 8)])


@check("logprobs")
def logprobs():
    answer = chat(logprobs=True, top_logprobs=2).invoke(QUESTION)
    expect(answer.response_metadata["logprobs"]["content"], "no log-probabilities")


@check("content parts")
def parts():
    expect_texts([chat().invoke([HumanMessage([{"type": "text", "text": QUESTION}])]).content])


@check("OpenAI with n and best_of")
def completions():
    answer = OpenAI(**SETTINGS, n=2, best_of=2, max_tokens=8).generate(["def main():"])
    expect_texts([generation.text for generation in answer.generations[0]])


@check("history with tool results")
def tool_history():
    call = {"id": "c1", "name": "f", "args": {"a": 1}}
    history = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), ToolMessage("2", tool_call_id="c1")]
    expect_texts([chat().invoke(history).content])


@check("Responses")
def responses():
    expect(chat(use_responses_api=True, max_tokens=16).invoke(QUESTION).content, "no content")


@check("prompt that is too long")
def too_long():
    expect_raises(ContextOverflowError, lambda: chat().invoke("word " * 5000))


class Answer(BaseModel):
    """Schema of a structured answer."""

    number: bool


@check("structured output")
def structured():
    model = chat(max_tokens=200).with_structured_output(Answer, method="json_schema")
    expect(isinstance(model.invoke(QUESTION), Answer), "not structured")


@check("bind_tools")
def tools():
    expect(chat(max_tokens=200).bind_tools([Answer], tool_choice="required").invoke(QUESTION).tool_calls, "no calls")


if __name__ == "__main__":
    run_checks()
