"""Grammars in the form of xgrammar's compiler, without importing it: most refusals need no library."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from eagleray.errors import InvalidRequest
from eagleray.grammars.structural_tags import name_field, parse_structural_tag
from eagleray.grammars.xgrammar_process import CompileJob
from eagleray.grammars.xgrammar_regexes import check_regex, regexes_of_lark
from eagleray.grammars.xgrammar_schemas import PARAM, check_enforced
from eagleray.messages.grammars import Grammar
from eagleray.messages.structured_outputs import DEFAULT_WHITESPACE, MAX_WHITESPACE


def compile_job(grammar: Grammar) -> CompileJob:
    """Return the grammar in the form of the library. Raises `InvalidRequest` for a schema that it does not enforce."""
    source = grammar.source
    match grammar.kind:
        case "json_schema":
            check_enforced(_parse_schema(source))
            return CompileJob(
                method="compile_json_schema", arguments=[source], options=_json_options(grammar.whitespace)
            )
        case "choice":
            texts = [{"type": "const_string", "value": text} for text in json.loads(source)]
            tag = {"type": "structural_tag", "format": {"type": "or", "elements": texts}}
            return CompileJob(method="compile_structural_tag", arguments=[json.dumps(tag)])
        case "regex":
            check_regex(source)
            return CompileJob(method="compile_regex", arguments=[source])
        case "ebnf":
            _check_rules(source)
            return CompileJob(method="compile_grammar" if _is_gbnf(source) else "compile_lark", arguments=[source])
        case "structural_tag":
            return CompileJob(method="compile_structural_tag", arguments=[_structural_tag(source)])


def _json_options(whitespace: str) -> dict[str, Any]:
    options: dict[str, Any] = {"strict_mode": False}  # other properties are allowed unless the schema forbids them
    match whitespace:
        case "":
            return options | {"any_whitespace": False, "separators": [",", ":"]}
        case str() if whitespace == DEFAULT_WHITESPACE:
            return options | {"max_whitespace_cnt": MAX_WHITESPACE}
    raise InvalidRequest(
        "`whitespace_pattern` is not for the backend xgrammar: leave it out, or use the backend llguidance", param=PARAM
    )


def _structural_tag(source: str) -> str:
    """Return a structural tag in the newer form. Raises `InvalidRequest`."""
    form = msgspec.to_builtins(parse_structural_tag(source, PARAM))
    _check_parts(form)
    return json.dumps({"type": "structural_tag", "format": form})


def _check_parts(form: Any) -> None:
    """Raise `InvalidRequest` for a schema, an expression or a grammar in a structural tag that is not enforced. Removes
    the names of fields, which the library does not take."""
    if isinstance(form, list):
        for part in form:
            _check_parts(part)
    elif isinstance(form, dict):
        match form.get("type"):
            case "json_schema":
                param = form.pop("param")
                try:
                    check_enforced(form["json_schema"])
                except InvalidRequest as error:
                    raise name_field(error, param) from None
            case "regex":
                check_regex(form["pattern"])
            case "grammar":
                _check_rules(form["grammar"])
            case _:
                _check_parts([*form.values()])


def _check_rules(grammar: str) -> None:
    """Raise `InvalidRequest` for a grammar that has a regular expression which is not followed."""
    if not _is_gbnf(grammar):
        for expression in regexes_of_lark(grammar):
            check_regex(expression)


def _is_gbnf(grammar: str) -> bool:
    return "::=" in grammar


def _parse_schema(source: str) -> Any:
    try:
        return json.loads(source)
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema is not valid JSON: {error}", param=PARAM) from None
