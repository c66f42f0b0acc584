"""Whole answers, in blocks: pieces of reasoning, content and tool calls, each with all of its text. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eagleray.client.answers.parts import CallArguments, CallBegin, Content, Reasoning
from eagleray.client.answers.plan import AnswerPlan


@dataclass(slots=True)
class ToolCall:
    """A call of a tool that an answer has."""

    id: str
    name: str
    arguments: str
    """A JSON object, unless the model broke it or was cut off."""


@dataclass(slots=True)
class AnswerText:
    """Consecutive text of one kind."""

    kind: type[Reasoning] | type[Content]
    text: str


Block = AnswerText | ToolCall


def split_answer(plan: AnswerPlan, prompt: str, text: str) -> list[Block]:
    """Return the blocks of the whole answer to a prompt, in order."""
    splitter = plan.splitter(prompt)
    blocks: list[Block] = []
    for part in (*splitter.push(text), *splitter.finish()):
        last = blocks[-1] if blocks else None
        match part:
            case CallBegin(name=name, id=call_id):
                blocks.append(ToolCall(call_id or plan.make_call_id(), name, ""))
            case CallArguments(text=more):
                assert isinstance(last, ToolCall), "arguments without a call"
                last.arguments += more
            case Reasoning(more) | Content(more):
                if isinstance(last, AnswerText) and isinstance(part, last.kind):
                    last.text += more
                else:
                    blocks.append(AnswerText(type(part), more))
    return blocks


def text_of(blocks: Iterable[Block], kind: type[Reasoning] | type[Content]) -> str | None:
    """Return the text of all blocks of a kind; None if there are none."""
    texts = [block.text for block in blocks if isinstance(block, AnswerText) and block.kind is kind]
    return "".join(texts) if texts else None
