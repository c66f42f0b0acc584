"""openai-agents: agents with tools and typed outputs, over /v1/chat/completions and /v1/responses."""

from __future__ import annotations

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.agent_output import AgentOutputSchema
from checking import MODEL, URL, check, expect, run_checks
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(True)
QUESTION = "How is the weather?"


class Report(BaseModel):
    """A weather report."""

    sky: Literal["clear", "cloudy"]
    degrees: int = Field(ge=-50, le=60)


def chat_model():
    return OpenAIChatCompletionsModel(MODEL, new_client())


def responses_model():
    return OpenAIResponsesModel(MODEL, new_client())


def new_client() -> AsyncOpenAI:
    """Return a client for one event loop: each run has its own."""
    return AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120, max_retries=0)


MAKERS = (chat_model, responses_model)


@check("text")
def text():
    for make in MAKERS:
        agent = Agent("a", model=make(), model_settings=ModelSettings(max_tokens=500, temperature=0))
        expect(Runner.run_sync(agent, QUESTION).final_output, "no text")


@check("typed output")
def typed_output():
    for make in MAKERS:
        settings = ModelSettings(max_tokens=200, temperature=0)
        agent = Agent("a", model=make(), output_type=AgentOutputSchema(Report), model_settings=settings)
        expect(isinstance(Runner.run_sync(agent, QUESTION).final_output, Report), "no report")


seen: list[str] = []


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Look up the weather."""
    seen.append(city)
    return "clear"


def calling_agent(make) -> Agent:
    return Agent(
        "a",
        model=make(),
        tools=[weather],
        tool_use_behavior="stop_on_first_tool",
        model_settings=ModelSettings(max_tokens=200, temperature=0, tool_choice="required", parallel_tool_calls=False),
    )


async def stream_events(agent: Agent) -> list[str]:
    return [event.type async for event in Runner.run_streamed(agent, QUESTION).stream_events()]


@check("tool call")
def tool_call():
    for make in MAKERS:
        seen.clear()
        expect(Runner.run_sync(calling_agent(make), QUESTION).final_output == "clear", "another result")
        expect(seen and set(seen) <= {"Rome", "Oslo"}, "calls", seen)


@check("tool call, streamed")
def streamed_tool_call():
    for make in MAKERS:
        seen.clear()
        expect("run_item_stream_event" in asyncio.run(stream_events(calling_agent(make))), "no events")
        expect(seen and set(seen) <= {"Rome", "Oslo"}, "calls", seen)


if __name__ == "__main__":
    run_checks()
