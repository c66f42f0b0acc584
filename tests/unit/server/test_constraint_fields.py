"""Fields that constrain the text of an answer: the grammar that reaches the engine, and errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from server_fakes import serving

from eagleray.messages.outputs import Chunk, FinishReason
from eagleray.messages.requests import Generate

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WHITESPACE = r"[ \n\t]{0,16}"
TAG = {"format": {"type": "any_text"}, "type": "structural_tag"}
OLD_TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<"], "type": "structural_tag"}
USER = {"role": "user", "content": "hello"}
ROUTES = {"/v1/chat/completions": {"messages": [USER]}, "/v1/completions": {"prompt": "hello"}}

CONSTRAINTS: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
     "json_schema", SCHEMA, WHITESPACE),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
     "json_schema", {"type": "object"}, WHITESPACE),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": False}}},
     "json_schema", False, WHITESPACE),
    ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}, WHITESPACE),
    ({"response_format": TAG}, "structural_tag", TAG, WHITESPACE),
    ({"response_format": OLD_TAG}, "structural_tag", OLD_TAG, WHITESPACE),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, WHITESPACE),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA, WHITESPACE),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "json_schema", SCHEMA, ""),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, "json_schema", SCHEMA, " ?"),
    ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
     "json_schema", SCHEMA | {"additionalProperties": False}, WHITESPACE),
    ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}, WHITESPACE),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", ""),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], ""),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"', ""),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structural_tag", TAG, WHITESPACE),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA, WHITESPACE),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, "json_schema", SCHEMA, " "),
    ({"guided_regex": "a+"}, "regex", "a+", ""),
    ({"guided_choice": ["a"]}, "choice", ["a"], ""),
    ({"guided_grammar": 'start: "a"'}, "ebnf", 'start: "a"', ""),
]  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
def test_constraint_field_reaches_the_engine(api, path):
    for fields, kind, source, whitespace in CONSTRAINTS:
        response = api.post(path, ROUTES[path] | fields)
        assert response.status_code == 200, response.text
        grammar = api.engine.requests[-1].sampling.grammar
        found = grammar.source if isinstance(source, str) else json.loads(grammar.source)
        assert (grammar.kind, found, grammar.whitespace) == (kind, source, whitespace), fields


def test_text_is_no_constraint(api):
    api.post("/v1/chat/completions", {"messages": [USER], "response_format": {"type": "text"}})
    assert api.engine.requests[-1].sampling.grammar is None


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type", "not a supported value"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs `json_schema`"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
     "response_format.json_schema.schema", "int"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one text"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "int"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs",
     "none of them; unknown here: `structured_outputs.regexp`"),
    ({"extra_body": {"guided_regex": "a"}}, "extra_body", "write them beside the other fields"),
    ({"structured_outputs": {"json": "{", "disable_additional_properties": True}},
     "structured_outputs", "not valid JSON"),
    ({"guided_whitespace_pattern": " ", "response_format": {"type": "json_object"}},
     "guided_whitespace_pattern", "is for `guided_json`"),
    ({"guided_choice": []}, "guided_choice", "at least one text"),
    ({"guided_json": 3}, "guided_json", "int"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "`guided_choice` both constrain"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs", "both"),
]  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
def test_constraint_field_that_is_wrong_is_refused_by_its_name(api, path):
    for fields, param, reason in WRONG:
        response = api.post(path, ROUTES[path] | fields)
        assert response.status_code == 400, fields
        error = response.json()["error"]
        assert error["param"] == param and reason in error["message"], fields
        assert "expected" not in error["message"] or "none of them" not in error["message"]


REFUSED = {
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
    "structured_outputs": {"regex": "("},
    "guided_grammar": "x",
}


def test_constraint_that_the_engine_refuses_is_a_400_that_names_the_field(api):
    def refuse(request: Generate) -> Iterator[Chunk]:
        failed = {"finish_reason": FinishReason.ERROR, "is_user_error": True, "param": "structured_outputs"}
        yield Chunk(request_id=request.request_id, error="the grammar is wrong", **failed)

    api.engine.script = refuse
    for field, value in REFUSED.items():
        for stream in (False, True):
            response = api.post("/v1/chat/completions", {"messages": [USER], "stream": stream, field: value})
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["message"]) == (field, "the grammar is wrong")


def test_constraint_without_a_tokenizer_is_refused(checkpoint):
    with serving(checkpoint, skip_tokenizer_init=True) as api:
        response = api.post("/v1/completions", {"prompt": [1, 2], "structured_outputs": {"regex": "a"}})
    assert (
        response.status_code == 400
        and "`structured_outputs` needs the tokenizer" in response.json()["error"]["message"]
    )


def test_constraint_of_given_tokens_is_refused(api):
    body = {"prompt": "a", "structured_outputs": {"regex": "a"}, "trace_decode_token_ids": [1]}
    response = api.post("/v1/completions", body)
    assert response.status_code == 400, response.text


def test_options_of_structured_outputs_are_the_defaults_of_requests(checkpoint):
    options = {
        "structured_outputs_whitespace": " ?",
        "structured_outputs_disable_additional_properties": True,
    }
    with serving(checkpoint, **options) as api:
        api.post("/v1/completions", {"prompt": "a", "guided_json": SCHEMA})
        grammar = api.engine.requests[-1].sampling.grammar
        assert grammar.whitespace == " ?" and json.loads(grammar.source) == SCHEMA | {"additionalProperties": False}
        given = {"json": SCHEMA | {"additionalProperties": True}, "whitespace_pattern": ""}
        api.post("/v1/completions", {"prompt": "a", "structured_outputs": given})
        grammar = api.engine.requests[-1].sampling.grammar
        assert grammar.whitespace == "" and json.loads(grammar.source)["additionalProperties"] is True


def test_constraint_that_is_nested_deeply_goes_to_the_engine_or_is_a_400(api):
    for depth, status in ((200, 200), (100_000, 400)):
        nested = '{"items":' * depth + "{}" + "}" * depth
        wrapped = f'{{"type":"json_schema","json_schema":{{"schema":{nested}}}}}'
        for field, value in {"guided_json": nested, "response_format": wrapped}.items():
            response = api.request("POST", "/v1/completions", content=f'{{"prompt":"a","{field}":{value}}}'.encode())
            assert response.status_code == status, response.text
