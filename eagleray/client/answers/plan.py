"""The form of the answers to one request: what constrains them, and how they are divided into parts.

An `AnswerPlan` combines the formats of the model with the tools of the request. It is immutable and serves all
completions of a request, in the HTTP routes and in `LLM.chat`; each completion has a splitter of its own.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

import msgspec

from eagleray.client.answers.formats import ReasoningFormat, StructuralFormat, ToolFormat
from eagleray.client.answers.parts import AnswerPart, Content, Splitter
from eagleray.client.answers.requested_tools import RequestedTools
from eagleray.client.answers.tools import Tool
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.errors import InvalidRequest, UnsupportedParameter
from eagleray.messages.grammars import PARAM
from eagleray.messages.structured_outputs import StructuredOutputsParams

StrictLevel = Literal["auto", "function", "parameter"]
"""Least constraint of calls that the model is free to make. `auto`: strict tools follow their schemas. `function`: all
calls are of offered tools, with a JSON object. `parameter`: all tools are strict."""


class AnswerFormats(NamedTuple):
    """The formats in which a model writes its answers."""

    tools: ToolFormat | None = None
    """None: its format of tool calls is not known."""
    reasoning: ReasoningFormat | None = None
    """None: reasoning is not divided from the answer."""
    strict_level: StrictLevel = "auto"
    disable_additional_properties: bool = False
    """Whether objects of constrained contents have only the properties that their schema names."""

    def plan(self, requested: RequestedTools) -> AnswerPlan:
        """Return the plan of a request. Raises `UnsupportedParameter` for tools if the model's format of calls is not
        known."""
        if requested.choice.mode == "none":
            return AnswerPlan(requested, reasoning=self.reasoning)
        if self.tools is None:
            raise UnsupportedParameter(
                "this server does not support tool calls (`tools`), because the model's chat template shows no known "
                "format of them: start it with the option `--tool-call-parser` and the name of the format, or give "
                "`tool_choice` none for an answer in text",
                param="tools",
            )
        return AnswerPlan(requested, self.tools, self.reasoning, self.strict_level, self.disable_additional_properties)


class AnswerPlan(NamedTuple):
    """The form of the answers to one request."""

    requested: RequestedTools = RequestedTools()
    tools: ToolFormat | None = None
    """Format of tool calls; None: the answers have none."""
    reasoning: ReasoningFormat | None = None
    """Format of the reasoning; None: it is a part of the content."""
    strict_level: StrictLevel = "auto"
    disable_additional_properties: bool = False
    """Whether objects of constrained contents have only the properties that their schema names."""

    @property
    def is_divided(self) -> bool:
        """Whether answers may have other parts than content."""
        return self.tools is not None or self.reasoning is not None

    @property
    def markers(self) -> list[str]:
        """Texts that divide answers."""
        markers = [] if self.tools is None else [*self.tools.markers]
        return markers if self.reasoning is None else [*markers, *self.reasoning.markers]

    def make_call_id(self) -> str:
        """Return an id for a call that the model gave none."""
        assert self.tools is not None
        return self.tools.make_call_id()

    def splitter(self, prompt: str) -> Splitter:
        """Return a splitter for one answer to a prompt."""
        rest = Undivided() if self.tools is None else self.tools.splitter(self.requested.offered.tools)
        return rest if self.reasoning is None else self.reasoning.splitter(prompt, rest)

    def constrain(self, content: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Return the constraint of an answer after its reasoning, if the request constrains its content by `content`.

        With a choice of tools that requires calls there is no content, and `content` has no effect.
        """
        if self.tools is None or (form := self._constraint(self.tools, content)) is None:
            return content
        try:
            tag = json.dumps({"type": "structural_tag", "format": form})
        except RecursionError:
            raise InvalidRequest("the schemas of `tools` are nested too deeply", param="tools") from None
        if content is None:
            return StructuredOutputsParams(structural_tag=tag)
        return StructuredOutputsParams(
            structural_tag=tag,
            disable_any_whitespace=content.disable_any_whitespace,
            whitespace_pattern=content.whitespace_pattern,
        )

    def sampling_fields(self, content: StructuredOutputsParams | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that such answers need, see `constrain`."""
        fields: dict[str, Any] = {}
        if (constraint := self.constrain(content)) is not None:
            after_reasoning = constraint.after_reasoning or self.reasoning is not None
            fields["structured_outputs"] = msgspec.structs.replace(constraint, after_reasoning=after_reasoning)
        if self.is_divided and tokenizer is not None and (kept := tokenizer.special_ids_of(self.markers)):
            fields["kept_special_token_ids"] = kept
        return fields

    def _constraint(self, calls: ToolFormat, content: StructuredOutputsParams | None) -> StructuralFormat | None:
        tools, choice = self.requested.offered.tools, self.requested.choice
        if choice.mode == "auto" and content is None:
            tools = self._floor(tools)
            form = calls.constraint(tools, choice)
            if form is None and not choice.is_parallel:
                raise _no_constraint(calls, "`parallel_tool_calls` false", "parallel_tool_calls")
            if form is None and any(tool.strict for tool in tools):
                raise _no_constraint(calls, "a strict tool", "tools")
            return form
        form = calls.constraint(tools, choice._replace(mode="required"))
        if form is None:
            if choice.mode == "required":
                raise _no_constraint(calls, "a required call", "tool_choice")
            raise _no_constraint(calls, "a constrained content beside tools", PARAM)
        if choice.mode == "auto" and content is not None:
            content_form = _structural_format(content, disable_additional_properties=self.disable_additional_properties)
            return {"type": "or", "elements": [form, calls.content_constraint(content_form)]}
        return form

    def _floor(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        """Return the tools with the least constraints of the server."""
        if self.strict_level == "auto":
            return tools
        changes: dict[str, Any] = {} if self.strict_level == "parameter" else {"parameters": {"type": "object"}}
        return tuple(tool if tool.strict else msgspec.structs.replace(tool, strict=True, **changes) for tool in tools)


def _no_constraint(calls: ToolFormat, feature: str, param: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"the format {calls.name} of tool calls has no constraints, which {feature} would need: leave it out",
        param=param,
    )


class Undivided:
    """Splitter of answers that are content alone."""

    def push(self, text: str) -> list[AnswerPart]:
        return [Content(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        return []


def _structural_format(content: StructuredOutputsParams, *, disable_additional_properties: bool) -> StructuralFormat:
    """Return a constraint as a part of a structural tag. Raises `InvalidRequest` for one that is a structural tag."""
    grammar = content.to_grammar(disable_additional_properties=disable_additional_properties)
    match grammar.kind:
        case "regex":
            return {"type": "regex", "pattern": grammar.source}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.source}
        case "structural_tag":
            raise InvalidRequest(
                "a structural tag and `tools` both constrain the answer: give one of them, or `tool_choice` none",
                param=PARAM,
            )
    try:
        source = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON schema is not valid JSON: {error}", param=PARAM) from None
    if grammar.kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in source]}
    return {"type": "json_schema", "json_schema": source}
