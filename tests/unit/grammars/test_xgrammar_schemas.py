from __future__ import annotations

import re
from typing import Any

import pytest

from eagleray.errors import InvalidRequest
from eagleray.grammars.xgrammar_schemas import check_enforced


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"not": {"type": "string"}}, "required": ["not"], "title": "t"},
        {"type": ["string", "null"], "minLength": 1},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
        {"anyOf": [{"const": 1}, {"type": "string", "enum": ["not"]}]},
        {"type": "object", "additionalProperties": {"type": "number", "minimum": 0.5}},
    ],
)
def test_check_enforced_accepts_schemas_that_xgrammar_follows(schema: Any):
    check_enforced(schema)


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"minimum": 3}, ["minimum"]),
        ({"type": "string", "minimum": 3, "not": {}}, ["minimum", "not"]),
        ({"type": "string", "pattern": "a", "maxLength": 3}, ["maxLength"]),
        ({"type": "string", "format": "iri"}, ["format"]),
        ({"type": "object", "required": ["a"]}, ["required"]),
        ({"allOf": [{"type": "integer"}]}, ["allOf"]),
        ({"oneOf": [{"type": "integer"}]}, ["oneOf"]),
        ({"type": "array", "items": {"type": "integer", "multipleOf": 2}}, ["multipleOf"]),
        ({"anyOf": [{"type": "array", "uniqueItems": True}]}, ["uniqueItems"]),
        ({"$ref": "https://example.com/schema"}, ["$ref"]),
        ({"enum": ["a"], "minLength": 2}, ["minLength"]),
        ({"type": "object", "properties": {"a": {"patternProperties": {}}}}, ["patternProperties"]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"if": True}}}, ["if"]),
    ],
)
def test_check_enforced_names_the_keywords_without_effect(schema: Any, names: list[str]):
    listed = ", ".join(f"`{name}`" for name in names)
    with pytest.raises(InvalidRequest, match=re.escape(f"stand: {listed};")):
        check_enforced(schema)
