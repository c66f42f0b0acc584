"""Arguments of tool calls as one XML element for each property, in a grammar of llguidance.

Strings stand in the elements as they are, up to the end marker; every other value is JSON. The `format` of a string is
an annotation, as JSON Schema has it by default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher

from eagleray.grammars.ecma_regex import to_rust
from eagleray.grammars.free_text import FreeText, Opening
from eagleray.grammars.lark_rules import EMPTY, LarkRules, one_of, regex_literal, sequence, text_literal
from eagleray.grammars.llguidance_errors import refusal
from eagleray.grammars.llguidance_schemas import prepare_schema

Schema = dict[str, Any]

NAME: Final = "/[A-Za-z_][A-Za-z0-9_.-]*/"
"""Names of properties that the schema does not have."""

OBJECT_KEYWORDS: Final = ("patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired")
MAX_REFERENCES: Final = 100
COMBINATIONS: Final = ("anyOf", "oneOf")


@dataclass(frozen=True)
class XmlStyle:
    """Texts around the name and the value of a property."""

    before_name: str
    after_name: str
    before_value: str
    """Text before the value, which white space may separate from `after_name`. Empty if the value follows at once."""
    after_value: str
    padding: str = ""
    """Regular expression of the text on both sides of a string that does not belong to it."""


XML_STYLES: Mapping[str, XmlStyle] = {
    "qwen_xml": XmlStyle("<parameter=", ">", "", "</parameter>", padding=r"\n?"),
    "glm_xml": XmlStyle("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
}


class XmlParameters:
    """Writes the arguments of one tool into rules. `whitespace` may stand before each element, and around JSON."""

    def __init__(self, rules: LarkRules, free: FreeText, style: XmlStyle, whitespace: str) -> None:
        self._rules = rules
        self._free = free
        self._style = style
        self._whitespace = whitespace
        self._space = regex_literal(whitespace) if whitespace else EMPTY
        self._padding = regex_literal(style.padding) if style.padding else EMPTY
        self._root: Schema = {}

    def write(self, schema: Schema) -> str:
        """Return the expression for the arguments. Raises ValueError for a schema of something else than an object, or
        with keywords that are not supported."""
        _check(schema)
        self._root = schema
        schema = self._resolve(schema)
        if schema.get("type", "object") != "object":
            raise ValueError("the schema of XML parameters has to be an object's")
        if unsupported := [keyword for keyword in (*OBJECT_KEYWORDS, *COMBINATIONS, "allOf") if keyword in schema]:
            raise ValueError(f"the schema of XML parameters has keywords that are not supported: {unsupported}")
        required = schema.get("required", [])
        properties = schema.get("properties", {}) | {
            name: True for name in required if name not in schema.get("properties", {})
        }
        elements = [
            f"({self._element(text_literal(name), value)}){'' if name in required else '?'}"
            for name, value in properties.items()
        ]
        others = schema.get("additionalProperties", "properties" not in schema)
        if others is not False:
            elements.append(f"({self._element(self._other_names(properties), others)})*")
        return self._rules.rule(sequence(elements))

    def _other_names(self, properties: Mapping[str, Any]) -> str:
        known = one_of(map(text_literal, properties)) if properties else EMPTY
        return self._rules.terminal(f"{NAME} & ~{known}")

    def _element(self, name: str, value: Schema | bool) -> str:
        style = self._style
        before_value = self._after_space(style.before_value) if style.before_value else EMPTY
        return self._rules.rule(
            sequence(
                [
                    self._after_space(style.before_name),
                    name,
                    self._free.literal(style.after_name),
                    before_value,
                    self._value(value),
                ]
            )
        )

    def _value(self, schema: Schema | bool) -> str:
        """Return the expression for a value and the marker after it."""
        forms = self._forms(schema)
        if forms is None:
            return self._free.until([self._end], [])
        return one_of(forms)

    @property
    def _end(self) -> Opening:
        return self._free.opening(self._style.after_value)

    def _forms(self, schema: Schema | bool) -> list[str] | None:
        """Return the expressions for the forms of a value with the marker after it. None if any text is one."""
        if isinstance(schema, bool):
            if not schema:
                raise ValueError("a property has the schema `false`, which matches nothing")
            return None
        schema = self._resolve(schema)
        if "const" in schema or "enum" in schema:
            return [self._constant(value) for value in schema.get("enum", [schema.get("const")])]
        types = schema.get("type")
        if types is None:
            return self._untyped(schema)
        types = [types] if isinstance(types, str) else types
        forms: list[str] = []
        if "string" in types:
            if (shape := self._shape(schema)) is None:
                return None
            forms.append(self._free.shaped(self._end, shape))
        if others := [name for name in types if name != "string"]:
            forms.append(self._json(schema | {"type": others}))
        return forms

    def _untyped(self, schema: Schema) -> list[str] | None:
        for keyword in COMBINATIONS:
            if keyword in schema:
                found = [self._forms(one) for one in schema[keyword]]
                return None if None in found else [form for forms in found for form in forms or ()]
        if len(schema.get("allOf", ())) == 1:
            return self._forms(schema["allOf"][0])
        return None

    def _constant(self, value: Any) -> str:
        if not isinstance(value, str):
            return self._json({"const": value})
        text = self._rules.terminal(sequence([self._padding, text_literal(value), self._padding]))
        return sequence([text, self._free.literal(self._style.after_value)])

    def _shape(self, schema: Schema) -> str | None:
        """Return the expression for the strings of a schema, or None if it has all strings."""
        shapes = []
        if "pattern" in schema:
            shapes.append(regex_literal(_whole_pattern(to_rust(schema["pattern"]))))
        if "minLength" in schema or "maxLength" in schema:
            shapes.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
        if not shapes:
            return None
        return self._rules.terminal(sequence([self._padding, f"({' & '.join(shapes)})", self._padding]))

    def _json(self, schema: Schema) -> str:
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        value = self._rules.json_schema(definitions | schema, self._whitespace)
        return sequence([self._space, value, self._after_space(self._style.after_value)])

    def _after_space(self, marker: str) -> str:
        return self._free.literal(marker, before=self._space)

    def _resolve(self, schema: Schema) -> Schema:
        """Return a schema with the properties of the one that its `$ref` names. Raises ValueError."""
        for _ in range(MAX_REFERENCES):
            if "$ref" not in schema:
                return schema
            reference = schema["$ref"]
            target: Any = self._root
            for name in reference.removeprefix("#").split("/")[1:]:
                target = target.get(name) if isinstance(target, dict) else None
            if not reference.startswith("#") or not isinstance(target, dict):
                raise ValueError(f"the schema has no {reference!r}")
            schema = target | {key: value for key, value in schema.items() if key != "$ref"}
        raise ValueError("the schema has references in a circle")


def _check(schema: Schema) -> None:
    """Raise `InvalidRequest` for a schema that is wrong, or that JSON could not follow."""
    grammar = LLMatcher.grammar_from_json_schema(prepare_schema(json.dumps(schema), ""))
    if message := LLMatcher.validate_grammar(grammar):
        raise refusal(message, "json_schema")


def _whole_pattern(pattern: str) -> str:
    """Return a regular expression of the strings in which the pattern of a JSON schema is found. Anchors are known at
    its ends only, where no alternatives make it unclear which of them they belong to."""
    if "|" in pattern and not re.fullmatch(r"\^\(.*\)\$", pattern):
        return f"(?s:.*)(?:{pattern})(?s:.*)"
    begin, pattern = ("", pattern[1:]) if pattern.startswith("^") else ("(?s:.*)", pattern)
    end, pattern = ("", pattern[:-1]) if pattern.endswith("$") else ("(?s:.*)", pattern)
    return f"{begin}(?:{pattern}){end}"
