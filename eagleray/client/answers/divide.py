"""Whole answers, divided into their parts. Pure."""

from __future__ import annotations

from typing import NamedTuple

from eagleray.client.answers.parts import CallArguments, CallBegin, Content, Reasoning, ToolCall
from eagleray.client.answers.plan import AnswerPlan


class DividedAnswer(NamedTuple):
    """The parts of an answer. Parts of the same kind are joined."""

    reasoning: str | None
    content: str | None
    """None beside reasoning or calls if there is no text."""
    tool_calls: list[ToolCall]


def divide_answer(plan: AnswerPlan, prompt: str, text: str) -> DividedAnswer:
    """Return the parts of the whole answer to a prompt."""
    splitter = plan.splitter(prompt)
    reasoning, content, calls = "", "", list[ToolCall]()
    for part in (*splitter.push(text), *splitter.finish()):
        match part:
            case Reasoning(more):
                reasoning += more
            case Content(more):
                content += more
            case CallBegin(_, name, call_id):
                calls.append(ToolCall(call_id or plan.make_call_id(), name, ""))
            case CallArguments(number, more):
                calls[number].arguments += more
    is_empty = not content and (reasoning or calls)
    return DividedAnswer(reasoning or None, None if is_empty else content, calls)
