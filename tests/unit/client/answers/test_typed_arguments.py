"""Arguments that models write as text, by the types of a tool's schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eagleray.client.answers import typed_arguments
from eagleray.client.answers.part_writer import PartWriter
from eagleray.client.answers.parts import CallArguments
from eagleray.client.answers.tools import Tool
from eagleray.client.answers.typed_arguments import ParameterTypes, TypedArguments


def written(schema: Any, value: str) -> str:
    """Return the JSON of one parameter's value."""
    parts = PartWriter()
    parameters = {"properties": {"p": schema}, "$defs": {"Color": {"enum": ["red"]}, "Point": {"type": "object"}}}
    arguments = TypedArguments(parts, ParameterTypes([Tool(name="f", parameters=parameters)]), "f")
    parts.begin_call("f")
    arguments.begin_parameter("p")
    for character in value:
        arguments.value(character)
    arguments.end_parameter()
    arguments.end()
    text = "".join(part.text for part in parts.take() if isinstance(part, CallArguments))
    assert list(json.loads(text)) == ["p"]
    return text.removeprefix('{"p": ').removesuffix("}")


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, 'a "b"\n', '"a \\"b\\"\\n"'),
        ({"type": "string"}, "12", '"12"'),
        ({}, "12", '"12"'),
        (None, "12", '"12"'),
        ({"type": "integer"}, " 12\n", "12"),
        ({"type": "integer"}, "1" * 50, "1" * 50),
        ({"type": "integer"}, "12.0", "12.0"),
        ({"type": "integer"}, "twelve", '"twelve"'),
        ({"type": "number"}, "1.50", "1.50"),
        ({"type": "number"}, ".5", "0.5"),
        ({"type": "number"}, "inf", '"inf"'),
        ({"type": "number"}, "1_0", '"1_0"'),
        ({"type": "number"}, "１", '"１"'),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "+1e999", '"+1e999"'),
        ({"type": ["number", "string"]}, "007", '"007"'),
        ({"type": ["number", "string"]}, "-7.5", "-7.5"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "Nobody", '"Nobody"'),
        ({"type": ["string", "integer"]}, "12", "12"),
        ({"type": "object"}, '{"a": [1]}', '{"a": [1]}'),
        ({"type": "object"}, "{a: 1}", '"{a: 1}"'),
        ({"type": "array"}, "[NaN]", '"[NaN]"'),
        ({"type": "array"}, "[" * 9999, json.dumps("[" * 9999)),
        ({"enum": [1, "a"]}, "1", "1"),
        ({"const": None}, "null", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "null"),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', '{"x": 1}'),
        ({"$ref": "#/$defs/Color"}, "1", '"1"'),
        ({"$ref": "#/$defs/Nothing"}, "1", '"1"'),
        ({"$ref": "#/properties/p"}, "1", '"1"'),
        ({"anyOf": [{"$ref": "#/properties/p"}, {"$ref": "#/properties/p"}, {"type": "integer"}]}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/Point"}], "description": "p"}, "{}", "{}"),
    ],
)
def test_typed_arguments_value_becomes_json_of_its_type(schema: Any, value: str, expected: str) -> None:
    assert written(schema, value) == expected


def test_parameter_types_repeated_parameter_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    find = typed_arguments.types_of_schema
    monkeypatch.setattr(typed_arguments, "types_of_schema", lambda *schemas: read.append(schemas[0]) or find(*schemas))
    schema = {"enum": [1, 2]}
    types = ParameterTypes([Tool(name="f", parameters={"properties": {"p": schema}}), Tool(name="g")])
    assert [types.find(tool, name) for tool in ("f", "g", "h") for name in ("p", "q", "p")] == [
        *({"integer"}, {"string"}, {"integer"}),
        *[{"string"}] * 6,
    ]
    assert read == [schema]
