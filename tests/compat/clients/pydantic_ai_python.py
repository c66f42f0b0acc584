"""pydantic-ai: agents whose outputs are typed, by tools and by schemas, whole and streamed, with tools of their own."""

from __future__ import annotations

import asyncio
from typing import Literal

from checking import MODEL, URL, check, expect, expect_texts, run_checks
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "Which city is it?"
SETTINGS = {"max_tokens": 300, "temperature": 0.0}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    size: Literal["small", "large"]


def provider() -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{URL}/v1", api_key="none")


def chat_model() -> OpenAIChatModel:
    return OpenAIChatModel(MODEL, provider=provider())


def responses_model() -> OpenAIResponsesModel:
    return OpenAIResponsesModel(MODEL, provider=provider())


def expect_city(output: object) -> None:
    expect(isinstance(output, City), "not a city", output)


@check("text")
def text():
    expect_texts([Agent(chat_model(), model_settings=SETTINGS | {"max_tokens": 8}).run_sync(QUESTION).output])


@check("output by a tool")
def tool_output():
    agent = Agent(chat_model(), output_type=ToolOutput(City), model_settings=SETTINGS)
    expect_city(agent.run_sync(QUESTION).output)


@check("output by a schema")
def native_output():
    agent = Agent(chat_model(), output_type=NativeOutput(City), model_settings=SETTINGS)
    expect_city(agent.run_sync(QUESTION).output)


@check("output by a schema, Responses")
def native_responses():
    agent = Agent(responses_model(), output_type=NativeOutput(City), model_settings=SETTINGS)
    expect_city(agent.run_sync(QUESTION).output)


@check("output by a tool, Responses")
def tool_responses():
    agent = Agent(responses_model(), output_type=ToolOutput(City), model_settings=SETTINGS)
    expect_city(agent.run_sync(QUESTION).output)


@check("streamed output")
def streamed_output():
    async def run() -> tuple[int, object]:
        agent = Agent(chat_model(), output_type=ToolOutput(City), model_settings=SETTINGS)
        async with agent.run_stream(QUESTION) as result:
            parts = [part async for part in result.stream_output(debounce_by=None)]
            return len(parts), await result.get_output()

    num_parts, output = asyncio.run(run())
    expect(num_parts > 0, "no parts")
    expect_city(output)


if __name__ == "__main__":
    run_checks()
