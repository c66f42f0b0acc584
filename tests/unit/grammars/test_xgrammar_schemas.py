from __future__ import annotations

import json
import re
from typing import Any

import pytest

from eagleray.errors import InvalidRequest
from eagleray.grammars.xgrammar_jobs import compile_job
from eagleray.grammars.xgrammar_schemas import check_enforced
from eagleray.messages.grammars import Grammar


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"not": {}}, "required": ["not"], "additionalProperties": False, "title": "t"},
        {"type": ["string", "null"], "pattern": r"^[^a]\$$"},
        {"type": "string", "pattern": r"^(?:a|(?<name>\d))[$^(?=]\/\x41\b$"},
        {"type": "object", "minProperties": 1},
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
        ({"type": "string", "minLength": 1}, ["minLength"]),
        ({"type": "string", "pattern": r"\S"}, ["pattern"]),
        ({"type": "string", "pattern": "^a$|^b$"}, ["pattern"]),
        ({"type": "string", "pattern": "^(?!a)[ab]$"}, ["pattern"]),
        ({"type": "string", "pattern": "(?<=a)b"}, ["pattern"]),
        ({"type": "string", "pattern": "(?i)a"}, ["pattern"]),
        ({"type": "string", "pattern": r"a\Z"}, ["pattern"]),
        ({"type": "string", "pattern": "a\\"}, ["pattern"]),
        ({"type": "string", "format": "date"}, ["format"]),
        ({"type": "object", "minProperties": 2}, ["minProperties above 1"]),
        ({"type": "object", "properties": {"a": {}}}, ["additionalProperties other than false"]),
        ({"type": "string", "format": "iri"}, ["format"]),
        ({"type": "object", "required": ["a"]}, ["required"]),
        ({"allOf": [{"type": "integer"}]}, ["allOf"]),
        ({"oneOf": [{"type": "integer"}]}, ["oneOf"]),
        ({"type": "array", "items": {"type": "integer", "multipleOf": 2}}, ["multipleOf"]),
        ({"anyOf": [{"type": "array", "uniqueItems": True}]}, ["uniqueItems"]),
        ({"$ref": "https://example.com/schema"}, ["$ref"]),
        ({"$ref": "#anchor"}, ["$ref"]),
        ({"enum": ["a"], "minLength": 2}, ["minLength"]),
        ({"type": "array", "items": {"patternProperties": {}}}, ["patternProperties"]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"if": True}}}, ["if"]),
    ],
)
def test_check_enforced_names_the_keywords_without_effect(schema: Any, names: list[str]):
    listed = ", ".join(f"`{name}`" for name in names)
    with pytest.raises(InvalidRequest, match=re.escape(f"stand: {listed};")):
        check_enforced(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5},
        {"type": "object", "properties": 5},
        {"type": "object", "properties": {"a": {"type": [["string"]]}}, "additionalProperties": False},
        {"type": "object", "required": 5},
        {"type": "object", "required": [{}]},
        {"type": "string", "format": []},
        {"anyOf": 5},
        {"$defs": []},
    ],
)
def test_check_enforced_with_values_of_wrong_types_is_an_error(schema: Any):
    with pytest.raises(InvalidRequest, match="a type that JSON Schema does not allow"):
        check_enforced(schema)


def test_compile_job_names_the_field_of_a_schema_in_errors_alone():
    def job_of(schema: Any):
        schemas = [{"type": "json_schema", "json_schema": one, "param": f"f{n}"} for n, one in enumerate([{}, schema])]
        form = {"type": "sequence", "elements": schemas}
        return compile_job(Grammar(kind="structural_tag", source=json.dumps({"format": form})))

    assert "param" not in job_of({"type": "null"}).arguments[0]
    with pytest.raises(InvalidRequest, match=r"`f1`: xgrammar does not enforce .*`not`") as refused:
        job_of({"not": {}})
    assert refused.value.param == "f1"
