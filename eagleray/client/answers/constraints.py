"""Constraints of answers that call tools, as formats of structural tags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from eagleray.client.answers.formats import StructuralFormat
from eagleray.client.answers.tools import Tool, ToolChoice


def constrain_calls(
    tools: Sequence[Tool],
    choice: ToolChoice,
    tag: Callable[[Tool], StructuralFormat],
    trigger: str,
    separator: str = "",
) -> StructuralFormat | None:
    """Return the constraint for calls that are each written as `tag` returns it; None if all texts are allowed.

    `trigger` begins every tag and no other text. `separator` comes between calls that follow each other.
    """
    tags = [tag(tool) for tool in constrained_tools(tools, choice)]
    if not tags:
        return None
    if choice.mode == "required":
        return calls_only(tags, choice, separator)
    return calls_in_text(tags, choice, trigger)


def constrained_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """Return the tools that may be called, with the schemas that their arguments have to follow; none if all texts are
    allowed. Without a schema, arguments are any object."""
    if choice.mode == "required":
        return [tool for tool in tools if choice.name in (None, tool.name)]
    if choice.mode == "none" or (choice.is_parallel and not any(tool.strict for tool in tools)):
        return []
    free: dict[str, Any] = {"type": "object"}
    return [tool if tool.strict else msgspec.structs.replace(tool, parameters=free) for tool in tools]


def calls_only(tags: list[StructuralFormat], choice: ToolChoice, separator: str = "") -> StructuralFormat:
    """Return the format of one or more calls, without other text. A named tool is called once."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": choice.name is not None or not choice.is_parallel,
    }


def calls_in_text(tags: list[StructuralFormat], choice: ToolChoice, trigger: str) -> StructuralFormat:
    """Return the format of any text in which `trigger` begins a call. Without parallel calls the first one ends it."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not choice.is_parallel,
    }


def tag(begin: str, content: StructuralFormat, end: str | list[str]) -> StructuralFormat:
    """Return the format of a text between two others, of which the second may be one of several."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def constant(text: str) -> StructuralFormat:
    """Return the format of one text."""
    return {"type": "const_string", "value": text}


def json_value(schema: dict[str, Any], style: str = "json") -> StructuralFormat:
    """Return the format of a JSON value, or in another style, of one XML element for each property of an object."""
    return {"type": "json_schema", "json_schema": schema, "style": style}


def arguments_of(tool: Tool, style: str = "json") -> StructuralFormat:
    """Return the format of a tool's arguments, see `json_value`. If the schema is refused, the error names its place in
    the request."""
    return json_value(tool.parameters, style) | ({"param": tool.param} if tool.param else {})


def free_text() -> StructuralFormat:
    """Return the format of any text, up to the end of the tag that it is in."""
    return {"type": "any_text"}


def one_of(*formats: StructuralFormat) -> StructuralFormat:
    """Return the format of texts that have one of the formats."""
    return {"type": "or", "elements": list(formats)}


def optional(format: StructuralFormat) -> StructuralFormat:
    """Return the format of texts that have a format or are empty."""
    return {"type": "optional", "content": format}


def repeated(format: StructuralFormat) -> StructuralFormat:
    """Return the format of any number of texts of a format, one after the other."""
    return {"type": "star", "content": format}


def pattern(text: str) -> StructuralFormat:
    """Return the format of texts that match a regular expression."""
    return {"type": "regex", "pattern": text}


def sequence(*formats: StructuralFormat) -> StructuralFormat:
    """Return the format of texts one after the other."""
    return {"type": "sequence", "elements": list(formats)}
