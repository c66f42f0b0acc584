"""The parts of an answer, in the order in which the model writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Reasoning(NamedTuple):
    """More text of the model's thinking."""

    text: str


class Content(NamedTuple):
    """More text of the answer itself."""

    text: str


class CallBegin(NamedTuple):
    """A tool call has begun. All its arguments come before the next call begins."""

    call: int
    """Number of the call in the answer, from 0 on."""
    name: str
    id: str | None = None
    """Id that the model gave to the call; None in formats without ids."""


class CallArguments(NamedTuple):
    """More text of a call's arguments. The texts of one call, joined, are a JSON object unless the model broke it."""

    call: int
    text: str


AnswerPart = Reasoning | Content | CallBegin | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A whole call of a tool."""

    id: str
    name: str
    arguments: str
    """A JSON object, unless the model broke it or was cut off."""


class Splitter(Protocol):
    """Splits one answer. The parts depend on the joined text alone, not on how it was cut: parts of the same kind that
    follow each other, joined, are always the same."""

    def push(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain after this further text. Text that may become a marker is held back."""

    def finish(self) -> list[AnswerPart]:
        """Return the rest, when the answer has ended. A call that has not begun is content as the model wrote it."""
