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


def models():
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120, max_retries=0)
    yield OpenAIChatCompletionsModel(MODEL, client)
    yield OpenAIResponsesModel(MODEL, client)


@check("text")
def text():
    for model in models():
        agent = Agent("a", model=model, model_settings=ModelSettings(max_tokens=500, temperature=0))
        expect(Runner.run_sync(agent, QUESTION).final_output, "no text")


@check("typed output")
def typed_output():
    for model in models():
        agent = Agent(
            "a",
            model=model,
            output_type=AgentOutputSchema(Report),
            model_settings=ModelSettings(max_tokens=200, temperature=0),
        )
        expect(isinstance(Runner.run_sync(agent, QUESTION).final_output, Report), "no report")


@check("tool call, whole and streamed")
def tool_call():
    for model in models():
        seen: list[str] = []

        @function_tool
        def weather(city: Literal["Rome", "Oslo"]) -> str:
            """Look up the weather."""
            seen.append(city)  # noqa: B023  read before the next model
            return "clear"

        agent = Agent(
            "a",
            model=model,
            tools=[weather],
            tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(max_tokens=200, temperature=0, tool_choice="required"),
        )
        expect(Runner.run_sync(agent, QUESTION).final_output == "clear", "another result")

        async def stream(agent=agent) -> list[str]:
            result = Runner.run_streamed(agent, QUESTION)
            return [event.type async for event in result.stream_events()]

        expect("run_item_stream_event" in asyncio.run(stream()), "no events")
        expect(len(seen) == 2 and set(seen) <= {"Rome", "Oslo"}, "calls", seen)


if __name__ == "__main__":
    run_checks()
