"""Arguments that models write as plain text, parameter by parameter, as a JSON object."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from eagleray.client.answers.part_writer import PartWriter
from eagleray.client.answers.tools import Tool

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LENIENT_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_TYPES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"
}  # fmt: skip
_STRING = frozenset({"string"})


class ParameterTypes:
    """The types that the schemas of a request's tools give to parameters. Each schema is read once, because a model may
    repeat a parameter, and a schema may be long."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._found: dict[tuple[str, str], frozenset[str]] = {}

    def find(self, tool: str, parameter: str) -> frozenset[str]:
        """Return the names of the types of a parameter; `string` if no schema is known."""
        key = tool, parameter
        if key not in self._found:
            schema = self._schemas.get(tool, {})
            properties = schema.get("properties")
            if not isinstance(properties, dict) or parameter not in properties:
                return _STRING
            self._found[key] = types_of_schema(properties[parameter], schema)
        return self._found[key]


class TypedArguments:
    """Writes the arguments of one call of the `tool`. Strings are written as they come, other values when they are
    complete: the type in the tool's schema says what a text means."""

    def __init__(self, parts: PartWriter, parameter_types: ParameterTypes, tool: str) -> None:
        self._parts = parts
        self._parameter_types = parameter_types
        self._tool = tool
        self._separator = "{"
        self._types = _STRING
        self._value: list[str] = []

    def begin_parameter(self, name: str) -> None:
        """Begin a parameter."""
        self._types = self._parameter_types.find(self._tool, name)
        self._parts.arguments(f"{self._separator}{json.dumps(name, ensure_ascii=False)}: ")
        self._separator = ", "
        if self._types == _STRING:
            self._parts.arguments('"')

    def value(self, text: str) -> None:
        """Add text to the value of the parameter."""
        if self._types == _STRING:
            self._parts.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def end_parameter(self, is_complete: bool = True) -> None:
        """End the parameter. A string whose end never came stays open, so that it is seen to be cut off."""
        if self._types != _STRING:
            self._parts.arguments(to_json("".join(self._value), self._types))
            self._value.clear()
        elif is_complete:
            self._parts.arguments('"')

    def end(self) -> None:
        """End the arguments."""
        self._parts.arguments("{}" if self._separator == "{" else "}")


def types_of_schema(schema: object, root: dict[str, Any]) -> frozenset[str]:
    """Return the names of the types that a schema allows; `string` where it says nothing."""
    types: set[str] = set()
    seen: set[int] = set()  # schemas may refer to themselves
    pending = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        named = part.get("type")
        types.update(name for name in _list(named) or [named] if isinstance(name, str))
        if named is None:
            values = [part["const"]] if "const" in part else _list(part.get("enum"))
            types.update(_TYPES[type(value)] for value in values if type(value) in _TYPES)
        for choice in ("anyOf", "oneOf", "allOf"):
            pending.extend(_list(part.get(choice)))
        pending.append(_referenced(part.get("$ref"), root))
    return frozenset(types) or _STRING


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def to_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that a model wrote as plain text, as the first of its types that the text fits.

    Python's spellings of constants count too, since templates write them. A text that fits no type is JSON as it is
    written, or else a string.
    """
    bare = text.strip()
    if "null" in types and bare in ("null", "None"):
        return "null"
    if "integer" in types and _INTEGER.fullmatch(bare):
        return bare
    if "number" in types and (number := _number(bare, is_certain="string" not in types)) is not None:
        return number
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    value_type = _type_of_json(bare)
    if value_type in ("object", "array") and value_type in types:
        return bare
    if value_type is not None and "string" not in types:
        return bare
    return json.dumps(text, ensure_ascii=False)


def _number(text: str, *, is_certain: bool) -> str | None:
    """Return the JSON of a number; None for other texts. With `is_certain` the text cannot be meant as a string, so
    further spellings such as `.5` are numbers too."""
    if _NUMBER.fullmatch(text):
        return text
    if not is_certain or not _LENIENT_NUMBER.fullmatch(text):
        return None
    value = float(text)
    return json.dumps(value) if math.isfinite(value) else None


def _type_of_json(text: str) -> str | None:
    try:
        return _TYPES[type(json.loads(text, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _referenced(reference: object, root: dict[str, Any]) -> object:
    """Return the part of a schema that a local reference names; None if there is no such part."""
    part: object = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in reference[1:].split("/")[1:]:
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
    return part
