"""The tools that a request offers, and its choice among them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] = {}
    """JSON schema of the arguments, which are an object."""
    strict: bool = False
    """Whether arguments have to follow the schema, although the model is free to call the tool."""
    param: str = ""
    """Path of the schema in the request, which errors about it name."""


class ToolChoice(NamedTuple):
    """Choice of a request among its tools."""

    mode: Literal["none", "auto", "required"]
    """`required`: the answer is at least one call, and nothing else but reasoning."""
    name: str | None = None
    """Name of the only tool that may be called, with `required`; None: any of them."""
    is_parallel: bool = True
    """Whether an answer may have several calls."""
