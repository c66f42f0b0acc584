"""The constraint of a completion as users write it, with the names of vLLM."""

from __future__ import annotations

import json as json_module
import re
from typing import Any

import msgspec

from eagleray.errors import InvalidRequest
from eagleray.messages.grammars import PARAM, Grammar, GrammarKind

MAX_WHITESPACE = 16
DEFAULT_WHITESPACE = rf"[ \n\t]{{0,{MAX_WHITESPACE}}}"
"""White space between elements of JSON: enough for indented text, too little to wander in until `max_tokens`."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The fields of `StructuredOutputsParams` that constrain a text."""

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of JSON schemas whose value has schemas by name."""
VALUES = ("const", "enum", "default", "examples")
"""Keywords of JSON schemas whose value has no schemas."""


class StructuredOutputsParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Constraint of a completion's text: exactly one of the first six fields is given. Raises `InvalidRequest`."""

    json: str | dict[str, Any] | bool | None = None
    """JSON schema, as a mapping or as its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Grammar in EBNF: Lark's form, or that of GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | None = None
    """JSON of texts that begin and end constrained parts of a free text."""
    disable_any_whitespace: bool = False
    """Whether JSON has no white space between elements."""
    disable_additional_properties: bool = False
    """Whether objects have only the properties that the schema names."""
    whitespace_pattern: str | None = None
    """Regular expression of the white space between elements of JSON."""
    after_reasoning: bool = False
    """Whether the model may reason before the constrained text. True in conversations, whose answers are divided."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise InvalidRequest(f"`{PARAM}` needs exactly one of {', '.join(KINDS)}, but it has {found}", param=PARAM)
        if self.choice == []:
            raise InvalidRequest("`choice` needs at least one text", param=PARAM)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> StructuredOutputsParams:
        """Return the constraint with these fields. Raises `InvalidRequest`."""
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidRequest):
                raise error.__cause__ from None
            raise _wrong_fields(str(error)) from None

    def to_grammar(
        self, default_whitespace: str = DEFAULT_WHITESPACE, *, disable_additional_properties: bool = False
    ) -> Grammar:
        """Return the grammar, with the defaults of the options. Raises `InvalidRequest` for a schema that is not
        JSON."""
        whitespace = default_whitespace if self.whitespace_pattern is None else self.whitespace_pattern
        if self.disable_any_whitespace:
            whitespace = ""
        kind, source = self._kind_and_source()
        if self.json is not None and (self.disable_additional_properties or disable_additional_properties):
            source = json_module.dumps(_without_others(_parse_schema(source)))
        has_json = kind in ("json_schema", "structural_tag")
        return Grammar(kind=kind, source=source, whitespace=whitespace if has_json else "")

    def _kind_and_source(self) -> tuple[GrammarKind, str]:
        if self.json_object:
            return "json_schema", '{"type":"object"}'
        if self.json is not None:
            return "json_schema", self.json if isinstance(self.json, str) else _schema_text(self.json)
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", json_module.dumps(self.choice)
        if self.grammar is not None:
            return "ebnf", self.grammar
        assert self.structural_tag is not None
        return "structural_tag", self.structural_tag


def _wrong_fields(message: str) -> InvalidRequest:
    """Return the error for fields of which msgspec says that they are wrong."""
    what, _, path = message.partition(" - at `$")
    if found := re.match("Object contains unknown field `(.*)`", what):
        names = ", ".join(StructuredOutputsParams.__struct_fields__)
        return InvalidRequest(f"`{PARAM}` has no field {found[1]!r:.60}; it has {names}", param=PARAM)
    name = PARAM + path.rstrip("`")
    return InvalidRequest(f"`{name}`: {what[:1].lower()}{what[1:]}", param=name)


def _schema_text(schema: dict[str, Any] | bool) -> str:
    try:
        return json_module.dumps(schema)
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply", param=PARAM) from None


def _parse_schema(source: str) -> Any:
    try:
        return json_module.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON schema is not valid JSON: {error}", param=PARAM) from None


def _without_others(schema: Any) -> Any:
    """Return a schema in which an object that names properties, and does not speak of others, has no others."""
    if isinstance(schema, list):
        return [_without_others(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
            closed[keyword] = {name: _without_others(one) for name, one in value.items()}
        else:
            closed[keyword] = value if keyword in VALUES else _without_others(value)
    if "properties" in schema or "patternProperties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
