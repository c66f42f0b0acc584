"""The fields of a request that constrain its text: vLLM's, OpenAI's and the older names of vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from eagleray.errors import InvalidRequest
from eagleray.messages.grammars import PARAM
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray.server.fields import SamplingFields


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A schema in `response_format`."""

    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Meta(description="Default: any JSON object.")] = msgspec.field(
        default=None, name="schema"
    )
    strict: Annotated[bool | None, Meta(description="No effect: every answer follows its schema.")] = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Form of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: Annotated[dict[str, Any] | None, Meta(description="With the type structural_tag.")] = None
    structures: Annotated[list[dict[str, Any]] | None, Meta(description="With the type structural_tag.")] = None
    triggers: list[str] | None = None


class ConstraintFields(SamplingFields, kw_only=True):
    """The fields that constrain the text of an answer. At most one of them may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None, Meta(description="Constraint of the text, with the names of vLLM.")
    ] = None
    guided_json: Annotated[str | dict[str, Any] | None, Meta(description="`structured_outputs.json`.")] = None
    guided_regex: Annotated[str | None, Meta(description="`structured_outputs.regex`.")] = None
    guided_choice: Annotated[list[str] | None, Meta(description="`structured_outputs.choice`.")] = None
    guided_grammar: Annotated[str | None, Meta(description="`structured_outputs.grammar`.")] = None
    guided_whitespace_pattern: Annotated[
        str | None, Meta(description="`structured_outputs.whitespace_pattern`, with `guided_json`.")
    ] = None


CONSTRAINTS = (
    "structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"
)  # fmt: skip


def constraint_of(fields: ConstraintFields) -> StructuredOutputsParams | None:
    """Return the constraint that the fields ask for. Raises `InvalidRequest` if there are several, or white space
    without the schema that it is for."""
    if fields.guided_whitespace_pattern is not None and fields.guided_json is None:
        raise InvalidRequest(
            "`guided_whitespace_pattern` is for `guided_json`: give both, or use `structured_outputs` with `json` and "
            "`whitespace_pattern`",
            param="guided_whitespace_pattern",
        )
    given = {
        "structured_outputs": fields.structured_outputs,
        "response_format": _of_format(fields.response_format),
        "guided_json": _older(json=fields.guided_json, whitespace_pattern=fields.guided_whitespace_pattern),
        "guided_regex": _older(regex=fields.guided_regex),
        "guided_choice": _older(choice=fields.guided_choice),
        "guided_grammar": _older(grammar=fields.guided_grammar),
    }
    found = {name: constraint for name, constraint in given.items() if constraint is not None}
    if len(found) > 1:
        names = " and ".join(f"`{name}`" for name in found)
        raise InvalidRequest(f"{names} both constrain the answer: give one of them", param=next(iter(found)))
    return next(iter(found.values()), None)


def constraint_names(body: Any) -> Mapping[str, str]:
    """Return the name of the field by which the body constrains the answer, by the one that errors name."""
    for name in (*CONSTRAINTS, "tools"):
        match getattr(body, name, None):
            case None | ResponseFormat(type="text"):
                continue
        return {PARAM: name}
    return {}


def _older(*, whitespace_pattern: str | None = None, **fields: Any) -> StructuredOutputsParams | None:
    """Return the constraint of a field by its older name, if it is given."""
    if all(value is None for value in fields.values()):
        return None
    return StructuredOutputsParams(**fields, whitespace_pattern=whitespace_pattern)


def _of_format(form: ResponseFormat | None) -> StructuredOutputsParams | None:
    match form:
        case None | ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_object"):
            return StructuredOutputsParams(json_object=True)
        case ResponseFormat(type="structural_tag"):
            tag = {name: value for name, value in msgspec.structs.asdict(form).items() if value is not None}
            return StructuredOutputsParams(structural_tag=json.dumps(tag))
    if form.json_schema is None:
        raise InvalidRequest(
            '`response_format` of type json_schema needs `json_schema`: {"name": …, "schema": …}',
            param="response_format",
        )
    schema = form.json_schema.schema_
    return StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)
