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
    """Return the constraint for calls that are each written as `tag` says; None if all texts are allowed.

    `trigger` begins every tag and nothing else. `separator` comes between calls that follow each other. The
    arguments of a tool that needs no schema with this choice are any object.
    """
    if choice.mode == "none":
        return None
    if choice.mode == "required":
        return {
            "type": "tags_with_separator",
            "tags": [tag(tool) for tool in tools if choice.name in (None, tool.name)],
            "separator": separator,
            "at_least_one": True,
            "stop_after_first": choice.name is not None or not choice.is_parallel,
        }
    if choice.is_parallel and not any(tool.strict for tool in tools):
        return None
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": [tag(tool if tool.strict else _without_schema(tool)) for tool in tools],
        "at_least_one": False,
        "stop_after_first": not choice.is_parallel,
    }


def json_value(schema: dict[str, Any]) -> StructuralFormat:
    """Return the format of a JSON value."""
    return {"type": "json_schema", "json_schema": schema}


def _without_schema(tool: Tool) -> Tool:
    return msgspec.structs.replace(tool, parameters={"type": "object"})
