"""JSON schemas that llguidance alone would follow otherwise than the specification says."""

from __future__ import annotations

import json

import pytest
from grammar_walks import demo_walker

from eagleray.errors import InvalidRequest

INTEGER_A = {"type": "object", "properties": {"a": {"type": "integer"}}}
DEEP = '{"items":' * 5000 + "{}" + "}" * 5000


@pytest.mark.parametrize(
    ("schema", "text", "is_allowed"),
    [
        # a name has one form, so that a free property cannot take the place of a named one
        (INTEGER_A, r'{"\u0061": "x"}', False),
        (INTEGER_A, r'{"\u0062": "x"}', False),
        (INTEGER_A, '{"b": "x"}', True),
        ({"properties": {"a/b": {"type": "integer"}}, "type": "object"}, r'{"a\/b": "x"}', False),
        ({"type": "object", "minProperties": 1}, '{"a": 1}', True),
        ({"type": "object", "minProperties": 1}, "{}", False),
        # dates and times
        ({"format": "date"}, '"2024-02-29"', True),
        ({"format": "date"}, '"2023-02-29"', False),
        ({"format": "date"}, '"1900-02-29"', False),
        ({"format": "date"}, '"2000-02-29"', True),
        ({"format": "date"}, '"0000-01-01"', False),
        ({"format": "date", "pattern": "^2"}, '"1999-01-01"', False),
        ({"type": "string", "format": "date", "pattern": "^2"}, '"2999-01-01"', True),
        ({"format": "time"}, '"23:59:59.5Z"', True),
        ({"format": "time"}, '"10:59:60Z"', False),
        ({"format": "date-time"}, '"2024-02-29T23:59:59+01:00"', True),
        ({"format": "date-time"}, '"2023-02-29T23:59:59+01:00"', False),
        # formats that the specification does not define
        ({"type": "string", "format": "password"}, '"x"', True),
        ({"type": "integer", "format": "int64"}, "12", True),
        # expressions as in ECMA-262
        ({"pattern": r"^\S$"}, '"\ufeff"', False),
        ({"pattern": "^.$"}, r'"\r"', False),
        ({"pattern": "^[[a]]$"}, '"a"', False),
        ({"patternProperties": {r"^\s$": {"type": "integer"}}, "type": "object"}, '{"\ufeff": "x"}', False),
        # options of llguidance
        ({"x-guidance": {"item_separator": ";"}, "type": "array"}, "[1;1]", False),
        ({"x-guidance": {"whitespace_flexible": False}, "type": "array"}, "[1, 1]", True),
        # what has no effect
        ({"x-order": {"minProperties": 5}, "example": {"format": "iri"}}, "1", True),
        ({"description": "x" * 2**19}, "1", True),
        ({"type": "array", "uniqueItems": False, "title": "t", "default": [1e300]}, "[1, 1]", True),
        (True, "[1, {}]", True),
        # names and constants that look like keywords
        (
            {"type": "object", "properties": {"minProperties": {"type": "null"}, "$ref": {}}},
            '{"minProperties": null}',
            True,
        ),
        ({"const": {"format": "iri", "minProperties": 5}}, '{"format": "iri", "minProperties": 5}', True),
    ],
)
def test_schema_text_is_allowed_as_specified(schema, text, is_allowed):
    grammar = demo_walker().compile(json=json.dumps(schema))
    assert demo_walker().accepts(grammar, text) == is_allowed


@pytest.mark.parametrize(
    ("pattern", "most"), [(r"[ \n]{0,2}", 2), (r"[ \t]*", None), (r"\s{0,3}", 3), (" ?", 1), ("[ ]+", None)]
)
def test_whitespace_pattern_bounds_white_space_which_is_optional(pattern, most):
    grammar = demo_walker().compile(json={"type": "array"}, whitespace_pattern=pattern)
    for count in range(most or 40):
        assert demo_walker().accepts(grammar, f"[{' ' * count}1{' ' * (most or count)}]")
    if most is not None:
        assert not demo_walker().accepts(grammar, f"[{' ' * (most + 1)}1]")
        assert not demo_walker().accepts(grammar, f"[1{' ' * (2 * most)}]")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "minProperties": 2}, "`minProperties` is 2"),
        ({"items": {"const": 2**53 + 1}}, "at #/items: `const` has 9007199254740993"),
        ({"enum": [{"a": [2**53 + 1]}]}, "`enum` has 9007199254740993"),
        ('{"minimum": 0.12345678901234567890}', "`minimum` has 0.1234567890123456789"),
        ('{"maximum": 1e999}', "beyond 64 bits"),
        ('{"maximum": 1e99999999999999999999}', "beyond 64 bits"),
        ('{"maximum": 1e-99999999999999999999}', "beyond 64 bits"),
        ('{"maximum": NaN}', "NaN is not JSON"),
        ({"patternProperties": 5}, "wrong"),
        ({"required": [{}], "minProperties": 2, "type": "object"}, "`minProperties` is 2"),
        ({"enum": [1], "items": [{"multipleOf": n} for n in range(1, 9000)]}, "common multiple"),
        ({"type": "integer", "minimum": 1e30}, "`minimum` or `maximum` beyond 64 bits"),
        ({"type": "number", "multipleOf": 0}, "`multipleOf` must be above 0"),
        ({"type": "integer", "allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "common multiple"),
        ({"const": "a\x01"}, "`const` has a control character"),
        ({"pattern": r"^\x01$"}, r"pattern ^\x01$ is not supported"),
        ({"patternProperties": {"\x01": {}}}, "pattern \x01 is not supported"),
        ({"pattern": "^(?=a)"}, "`pattern`, `regex` or"),
        ({"pattern": r"\bfoo"}, "`pattern`, `regex` or `whitespace_pattern` looks around"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "`$schema` must be one of"),
        ({"$schema": "http://json-schema.org/draft-07/schema", "$ref": "#/$defs/a", "$id": "b"}, "`$id` beside `$ref`"),
        ({"format": "idn-email"}, "`format` idn-email is not supported"),
        ({"format": "date", "pattern": "1", "allOf": [{}]}, "`format` date beside both `pattern` and `allOf`"),
        ({"type": "array", "uniqueItems": True}, "not supported: `uniqueItems`, first at #;"),
        ({"not": {}, "unevaluatedItems": False}, "not supported: `not`, `unevaluatedItems`, first at #;"),
        (
            {"properties": {"not": {"enum": [{"not": 1}]}, "b": {"anyOf": [{"type": "null"}, {"items": {"not": {}}}]}}},
            "not supported: `not`, first at #/properties/b/anyOf/1/items;",
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "`oneOf` with alternatives that may match at once"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "`minProperties` or `maxProperties`"),
        ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "`patternProperties` that may match the same"),
        ({"$ref": "http://example.com/a.json"}, "`$ref`"),
        ({"type": "any"}, "`type` any"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "no value satisfies the JSON schema"),
        (False, "no value satisfies false"),
        ("[]", "must be an object"),
        ('{"type": ', "not valid JSON"),
        (DEEP, "nested too deeply"),
        ('{"const": ' + "[" * 200 + "]" * 200 + "}", "recursion limit exceeded"),
        ({"description": "x" * 2**20}, "more than 1048576 characters"),
        ({"enum": ["x" * 2**18]}, "more than 262144 characters without titles"),
        ({"items": {"items": 0}} | {"$defs": {"a": json.loads('[' * 200 + ']' * 200)}}, "nested more than"),
    ],
)  # fmt: skip
def test_schema_that_cannot_be_followed_is_refused_by_its_keyword(schema, words):
    with pytest.raises(InvalidRequest) as refused:
        demo_walker().compile(json=schema if isinstance(schema, str) else json.dumps(schema))
    assert words in str(refused.value)
