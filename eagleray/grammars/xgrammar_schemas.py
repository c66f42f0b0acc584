"""The JSON schemas that xgrammar enforces.

xgrammar ignores unknown keywords, with a warning in the log or without one, and then lets texts pass that the schema
forbids. So only schemas are taken whose every keyword it enforces where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from eagleray.errors import InvalidRequest
from eagleray.grammars.xgrammar_regexes import ignored_part

PARAM = "structured_outputs"

ANNOTATIONS = frozenset(
    ("$schema", "$id", "$comment", "$anchor", "title", "description", "default", "examples", "deprecated", "readOnly",
     "writeOnly", "$defs", "definitions")
)  # fmt: skip
OF_TYPE = {
    "string": frozenset(
        ("pattern", "format")
    ),  # with lengths it lets control characters pass, which JSON does not have
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties")),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
"""Keywords by the type that has to be named beside them: without it, any value passes."""
FORMATS = frozenset(
    ("email", "duration", "ipv6", "uuid", "uri", "uri-reference", "uri-template", "json-pointer",
     "relative-json-pointer")
)  # fmt: skip
"""Formats that it enforces. It has months of 31 days, leap seconds in every minute, leading zeros in `ipv4` and names
of any length in `hostname`."""
OTHER_SPACE = re.compile(r"\\[sS]")
"""White space, of which the library knows that of ASCII alone."""
ALONE = ("$ref", "anyOf", "enum", "const")
"""Keywords beside which others are not enforced."""


def check_enforced(schema: Any) -> None:
    """Raise `InvalidRequest` with the keywords of the schema that would have no effect, and for a value of a keyword
    that JSON Schema does not allow."""
    try:
        dropped = sorted(set(_dropped(schema)))
    except (AttributeError, TypeError):  # such as the items of a number
        raise InvalidRequest(
            "the JSON schema is wrong: a keyword has a value of a type that JSON Schema does not allow there",
            param=PARAM,
        ) from None
    if dropped:
        names = ", ".join(f"`{name}`" for name in dropped)
        raise InvalidRequest(
            f"xgrammar does not enforce these keywords of the JSON schema where they stand: {names}; leave them out, "
            "or use the backend llguidance",
            param=PARAM,
        )


def _dropped(schema: Any) -> Iterator[str]:
    """Yield the keywords of a schema and of the schemas in it that are not enforced."""
    if not isinstance(schema, dict):
        return
    keywords = schema.keys() - ANNOTATIONS
    alone = [name for name in ALONE if name in keywords]
    if alone:
        yield from keywords - {alone[0], "type"}
        if alone[0] in ("$ref", "anyOf") and "type" in keywords:
            yield "type"
        if not re.match("#(/|$)", str(schema.get("$ref", "#"))):
            yield "$ref"
    else:
        named = schema.get("type", ())
        types = [named] if isinstance(named, str) else named
        yield from keywords - {"type"} - frozenset[str]().union(*(OF_TYPE.get(kind, ()) for kind in types))
        yield from _dropped_together(schema)
    for inner in _inner_schemas(schema):
        yield from _dropped(inner)


def _dropped_together(schema: dict[str, Any]) -> Iterator[str]:
    """Yield keywords that are enforced alone, but not with their neighbours."""
    if "format" in schema and ("pattern" in schema or schema["format"] not in FORMATS):
        yield "format"
    pattern = str(schema.get("pattern", ""))
    if OTHER_SPACE.search(pattern) or ignored_part(pattern):
        yield "pattern"
    if schema.get("properties") and schema.get("additionalProperties") is not False:
        yield "additionalProperties other than false"  # an escape lets a free property have the name of another one
    if schema.get("minProperties", 0) not in (0, 1):
        yield "minProperties above 1"  # names may repeat
    if not set(schema.get("required", ())) <= schema.get("properties", {}).keys():
        yield "required"


def _inner_schemas(schema: dict[str, Any]) -> Iterator[Any]:
    for name in ("items", "additionalProperties"):
        yield schema.get(name)
    for name in ("anyOf", "prefixItems"):
        yield from schema.get(name, ())
    for name in ("properties", "$defs", "definitions"):
        yield from schema.get(name, {}).values()
