"""The tools of a request and its choice among them, in the forms of OpenAI's and Anthropic's APIs. Pure.

Errors name the field by its path.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from eagleray.client.answers.tools import Tool, ToolChoice
from eagleray.client.text.conversation import text_entry, wrong_entry

MAX_NAME_CHARS = 128
"""Longest name of a tool. OpenAI's API takes 64 characters, Anthropic's 128."""
WRONG_IN_NAMES = re.compile(r'[\s\x00-\x1f\x7f<>{}"\\|]')
"""Characters that delimit names in the formats of tool calls."""

REFERRING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
"""Keywords of schemas whose parts say what type a value has."""

MODES = ("none", "auto", "required")
CHOICES = 'none, auto, required or {"type": "function", "function": {"name": …}}'


class ToolForm(NamedTuple):
    """The place of a tool's entries in one API."""

    is_nested: bool
    """Whether the function is an object of its own in the tool, as it is for chat templates."""
    types: tuple[str | None, ...]
    """Types of tools that are functions."""
    example: str
    """A tool, for errors."""
    schema: str = "parameters"
    """Name of the schema of the arguments."""

    def shown(self, one: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a tool in the form of chat templates."""
        if self.is_nested:
            return one
        names = {"name": "name", "description": "description", self.schema: "parameters", "strict": "strict"}
        return {"type": "function", "function": {names[name]: value for name, value in one.items() if name in names}}


CHAT_TOOLS = ToolForm(
    is_nested=True,
    types=("function", None),
    example='{"type": "function", "function": {"name": …, "parameters": …}}',
)
"""Tools of /v1/chat/completions and of `LLM.chat`."""
RESPONSES_TOOLS = ToolForm(
    is_nested=False, types=("function",), example='{"type": "function", "name": …, "parameters": …}'
)
"""Tools of /v1/responses."""
ANTHROPIC_TOOLS = ToolForm(
    is_nested=False, types=("custom", None), example='{"name": …, "input_schema": …}', schema="input_schema"
)
"""Tools of /v1/messages."""


class OfferedTools(NamedTuple):
    """The tools of a request, twice: as they are called, and as the chat template shows them."""

    tools: tuple[Tool, ...] = ()
    shown: tuple[Mapping[str, Any], ...] = ()

    @property
    def names(self) -> Mapping[str, Tool]:
        """The tools by their names."""
        return {tool.name: tool for tool in self.tools}

    def only(self, names: set[str]) -> OfferedTools:
        """Return the tools of these names."""
        pairs = [(tool, shown) for tool, shown in zip(self.tools, self.shown, strict=True) if tool.name in names]
        return OfferedTools(tuple(tool for tool, _ in pairs), tuple(shown for _, shown in pairs))


class RequestedTools(NamedTuple):
    """The tools that the model sees, and how its answer may use them."""

    offered: OfferedTools = OfferedTools()
    choice: ToolChoice = ToolChoice("none")


def read_tools(given: Sequence[Any] | None, form: ToolForm) -> OfferedTools:
    """Return the tools of a request. Raises `InvalidRequest`."""
    if given is not None and not isinstance(given, Sequence):
        raise wrong_entry("tools", f"must be a list, but it is {given!r:.60}")
    tools: dict[str, Tool] = {}
    for index, one in enumerate(given or ()):
        path = f"tools[{index}]"
        if not isinstance(one, Mapping):
            raise wrong_entry(path, f"must be an object, but it is {one!r:.60}")
        if one.get("type") not in form.types:
            raise wrong_entry(
                f"{path}.type",
                f"is {one.get('type')!r:.60}, but the only tools here are functions of the form {form.example}",
            )
        if form.is_nested and "function" not in one:
            raise wrong_entry(f"{path}.function", f"is missing: a tool of this API is {form.example}")
        if not form.is_nested and "function" in one and "name" not in one:
            raise wrong_entry(f"{path}.name", f"is missing: a tool of this API is {form.example}")
        function, path = _function(one, path) if form.is_nested else (one, path)
        tool = _read_tool(function, path, form.schema)
        if tool.name in tools:
            raise wrong_entry(f"{path}.name", f"is {tool.name!r} a second time, but tools need different names")
        tools[tool.name] = tool
    return OfferedTools(tuple(tools.values()), tuple(map(form.shown, given or ())))


def _function(entry: Mapping[str, Any], path: str) -> tuple[Mapping[str, Any], str]:
    """Return the object `function` of an entry, and its path."""
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise wrong_entry(f"{path}.function", 'must be an object such as {"name": "f"}')
    return function, f"{path}.function"


def _read_tool(function: Mapping[str, Any], path: str, schema: str) -> Tool:
    name = text_entry(function, "name", path)
    _check_name(name, f"{path}.name")
    description, strict = function.get("description"), function.get("strict")
    if description is not None and not isinstance(description, str):
        raise wrong_entry(f"{path}.description", "must be a text")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_entry(f"{path}.strict", "must be true or false")
    parameters = _object_schema(function.get(schema), f"{path}.{schema}")
    return Tool(name=name, parameters=parameters, strict=bool(strict), param=f"{path}.{schema}")


def _check_name(name: str, path: str) -> None:
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise wrong_entry(path, f"must have 1 to {MAX_NAME_CHARS} characters, but it has {len(name)}")
    if (wrong := WRONG_IN_NAMES.search(name)) is not None:
        raise wrong_entry(path, f"is {name!r}, but names of tools have no {wrong[0]!r}: use letters, digits, _ and -")


def _object_schema(schema: Any, path: str) -> dict[str, Any]:
    """Return the schema of arguments, which are an object even if the schema does not say so. A tool without a schema
    has no arguments."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise wrong_entry(
            path, f'must be the JSON schema of an object, {{"type": "object", …}}, but it is {schema!r:.60}'
        )
    return dict(schema) if REFERRING.intersection(schema) else {"type": "object", **schema}


def choose_tools(offered: OfferedTools, choice: Any, *, is_parallel: bool | None = None) -> RequestedTools:
    """Return the tools for a `tool_choice` in the forms of /v1/chat/completions and /v1/responses.

    Raises `InvalidRequest`.
    """
    mode: Any = choice or "auto" if choice is None or choice in MODES else None
    if mode is None and not isinstance(choice, Mapping):
        raise wrong_entry("tool_choice", f"must be {CHOICES}, but it is {choice!r:.100}")
    if mode is None and choice.get("type") == "function":
        return choose_tool(offered, *_name_of(choice, "tool_choice"), is_parallel=is_parallel)
    if mode is None and choice.get("type") == "allowed_tools":
        mode, offered = _allowed(offered, choice)
    if mode is None:
        raise wrong_entry(
            "tool_choice.type", f"is {choice.get('type')!r:.60}, but it must be function or allowed_tools"
        )
    if mode == "required" and not offered.tools:
        raise wrong_entry("tool_choice", "asks for a call, but the request has no `tools`: give some, or leave it out")
    return RequestedTools(offered, ToolChoice(mode if offered.tools else "none", None, is_parallel is not False))


def choose_tool(offered: OfferedTools, name: str, path: str, *, is_parallel: bool | None = None) -> RequestedTools:
    """Return the choice of one tool, whose `name` is at the `path`. Raises `InvalidRequest` if it is not offered."""
    _check_offered(offered.names, name, path)
    return RequestedTools(offered, ToolChoice("required", name, is_parallel is not False))


def _check_offered(offered: Collection[str], name: str, path: str) -> None:
    if name not in offered:
        if not offered:
            raise wrong_entry(path, f"is {name!r:.150}, but the request has no `tools`")
        raise wrong_entry(path, f"is {name!r:.150}, which is none of the `tools`: {', '.join(offered):.500}")


def _name_of(entry: Any, path: str) -> tuple[str, str]:
    """Return the name in an entry that names a function in the form of either API, and the path of the name."""
    if not isinstance(entry, Mapping):
        raise wrong_entry(path, 'must be an object such as {"type": "function", "function": {"name": "f"}}')
    if "name" not in entry:
        entry, path = _function(entry, path)
    return text_entry(entry, "name", path), f"{path}.name"


def _allowed(offered: OfferedTools, choice: Mapping[str, Any]) -> tuple[Any, OfferedTools]:
    """Return the mode of a choice of type `allowed_tools`, and the tools that it allows: the model sees no others."""
    path = "tool_choice"
    if "allowed_tools" in choice:  # the form of /v1/chat/completions
        path += ".allowed_tools"
        choice = choice["allowed_tools"]
    mode, allowed = (choice.get("mode"), choice.get("tools")) if isinstance(choice, Mapping) else (None, None)
    if mode not in ("auto", "required"):
        raise wrong_entry(f"{path}.mode", f"must be auto or required, but it is {mode!r:.60}")
    if not isinstance(allowed, list) or not allowed:
        raise wrong_entry(f"{path}.tools", "must be a list of at least one function")
    offered_names, names = offered.names, set()
    for index, entry in enumerate(allowed):
        name, where = _name_of(entry, f"{path}.tools[{index}]")
        _check_offered(offered_names, name, where)
        names.add(name)
    return mode, offered.only(names)
