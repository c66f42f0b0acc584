"""The interface of the formats in which models write tool calls and reasoning."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from eagleray.client.answers.parts import Splitter
from eagleray.client.answers.tools import Tool, ToolChoice

StructuralFormat = dict[str, Any]
"""A value of the field `format` of a structural tag: which texts are allowed, see docs/structured_outputs.md."""


class ToolFormat(ABC):
    """One format of tool calls. Stateless; a splitter has the state of one answer."""

    name: str
    """Name of the parser in vLLM, for `--tool-call-parser`."""
    markers: tuple[str, ...]
    """Texts that delimit calls. Those that are special tokens of a tokenizer are decoded, although others are not."""

    def fits_template(self, template: str) -> bool:
        """Whether a chat template shows calls in this format: here, if it has all markers."""
        return all(marker in template for marker in self.markers)

    @abstractmethod
    def splitter(self, tools: Sequence[Tool]) -> Splitter:
        """Return a splitter for one answer, or for the part of one after its reasoning."""

    def constraint(self, tools: Sequence[Tool], choice: ToolChoice) -> StructuralFormat | None:
        """Return the constraint of the text (after the reasoning) that makes calls follow the schemas of their tools:
        of every tool with the choice `required`, of strict tools with `auto`. None if all texts are allowed, or if the
        format has no constraints, which refuses `required`."""
        return None

    def content_constraint(self, content: StructuralFormat) -> StructuralFormat:
        """Return the constraint of the text (after the reasoning) without calls, if its content has this format."""
        return content

    def make_call_id(self) -> str:
        """Return an id for a call that the model gave none, in a form that chat templates of the format take back."""
        return f"call_{secrets.token_hex(12)}"


@runtime_checkable
class ReasoningFormat(Protocol):
    """One format of reasoning. Stateless; a splitter has the state of one answer."""

    @property
    def name(self) -> str:
        """Name of the parser in vLLM, for `--reasoning-parser`."""
        ...

    @property
    def start(self) -> str:
        """Marker before the reasoning, which belongs to no part."""
        ...

    @property
    def end(self) -> str:
        """Marker after the reasoning, which belongs to no part."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that delimit reasoning. Those that are special tokens of a tokenizer are decoded, although others are
        not."""
        ...

    @property
    def end_prefix(self) -> str:
        """White space that the models write before the end marker."""
        ...

    @property
    def interrupts(self) -> tuple[str, ...]:
        """Texts that end reasoning without an end marker, such as the beginning of a tool call, and belong to the
        answer."""
        ...

    @property
    def answer_header(self) -> str:
        """Text between the reasoning and the content of an answer; if not empty, answers begin with reasoning."""
        ...

    def fits_template(self, template: str) -> bool:
        """Whether the chat template belongs to a model that reasons in this format."""
        ...

    def begins_reasoning(self, prompt: str) -> bool:
        """Whether the answer to this prompt begins with reasoning, without a start marker of its own."""
        ...

    def may_begin_reasoning(self, prompt: str) -> bool:
        """Whether the answer to this prompt may begin with a start marker: not if the prompt has closed the
        reasoning."""
        ...

    def splitter(self, prompt: str, rest: Splitter) -> Splitter:
        """Return a splitter for the answer to a prompt, which gives the text after the reasoning to `rest`."""
        ...
