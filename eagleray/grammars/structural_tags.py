"""Structural tags: texts that are free in parts and constrained in others, in the forms that xgrammar publishes.

The newer form is a tree of formats; the older one lists `structures` and the `triggers` that begin them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from eagleray.errors import InvalidRequest

TYPES = (
    "const_string, json_schema, any_text, regex, grammar, token, sequence, or, optional, plus, star, repeat, tag, "
    "triggered_tags, tags_with_separator"
)


MAX_PARAM_CHARS = 100


class _Base(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class ConstStringFormat(_Base, frozen=True, tag="const_string"):
    value: str


class SchemaFormat(_Base, frozen=True, tag="json_schema"):
    json_schema: bool | dict[str, Any]
    style: Literal["json", "qwen_xml", "glm_xml"] = "json"
    """JSON, or one XML element for each property of the object; values within properties are JSON."""
    any_order: Literal[False] = False
    max_whitespace_cnt: int | None = None
    param: Annotated[str, Meta(max_length=MAX_PARAM_CHARS)] = ""
    """Name of the field of the request that has the schema, for errors about it; empty: that of the structural tag."""


class AnyTextFormat(_Base, frozen=True, tag="any_text"):
    excludes: list[str] = []


class RegexFormat(_Base, frozen=True, tag="regex"):
    pattern: str


class GrammarFormat(_Base, frozen=True, tag="grammar"):
    grammar: str


class TokenFormat(_Base, frozen=True, tag="token"):
    token: int | str


class SequenceFormat(_Base, frozen=True, tag="sequence"):
    elements: list[Format]


class OrFormat(_Base, frozen=True, tag="or"):
    elements: list[Format]


class OptionalFormat(_Base, frozen=True, tag="optional"):
    content: Format


class PlusFormat(_Base, frozen=True, tag="plus"):
    content: Format


class StarFormat(_Base, frozen=True, tag="star"):
    content: Format


class RepeatFormat(_Base, frozen=True, tag="repeat"):
    min: int
    max: int
    """-1 if there is no largest number."""
    content: Format


class TagFormat(_Base, frozen=True, tag="tag"):
    begin: str | TokenFormat
    content: Format
    end: str | list[str] | TokenFormat


class TriggeredTagsFormat(_Base, frozen=True, tag="triggered_tags"):
    """Free text, in which each of the `triggers` begins one of the tags."""

    triggers: list[str]
    tags: list[TagFormat]
    at_least_one: bool = False
    """Whether the text begins with a tag."""
    stop_after_first: bool = False
    excludes: list[str] = []
    """Texts that the free text does not have."""


class TagsWithSeparatorFormat(_Base, frozen=True, tag="tags_with_separator"):
    tags: list[TagFormat]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstStringFormat
    | SchemaFormat
    | AnyTextFormat
    | RegexFormat
    | GrammarFormat
    | TokenFormat
    | SequenceFormat
    | OrFormat
    | OptionalFormat
    | PlusFormat
    | StarFormat
    | RepeatFormat
    | TagFormat
    | TriggeredTagsFormat
    | TagsWithSeparatorFormat
)


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newer form."""

    format: Format
    type: Literal["structural_tag"] = "structural_tag"


class StructureItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    schema: str | bool | dict[str, Any]
    end: str


class StructuralTagItems(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The older form."""

    structures: list[StructureItem]
    triggers: list[str]
    type: Literal["structural_tag"] = "structural_tag"

    def to_format(self) -> Format:
        tags = [TagFormat(item.begin, SchemaFormat(_schema(item.schema)), item.end) for item in self.structures]
        return TriggeredTagsFormat(self.triggers, tags)


def parse_structural_tag(text: str, param: str) -> Format:
    """Return the format that `text`, JSON, describes. Raises `InvalidRequest` about the field `param`."""
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        if "structures" in given:
            return msgspec.convert(given, StructuralTagItems).to_format()
        return msgspec.convert(given, StructuralTag).format
    except msgspec.MsgspecError as error:
        message = str(error)
    except RecursionError:
        message = "it is nested too deeply"
    known = f"; the types of formats are {TYPES}" if message.endswith("type`") else ""
    raise InvalidRequest(f"the structural tag is wrong: {message}{known}", param=param)


class PlacedSchema(NamedTuple):
    """A JSON schema in a structural tag."""

    before: str
    """Fixed text before the value, or one of several."""
    form: SchemaFormat


def schemas_in(form: Format, before: str = "") -> Iterator[PlacedSchema]:
    """Yield the schemas of a format. `before`: the text before it."""
    match form:
        case SchemaFormat():
            yield PlacedSchema(before, form)
        case TagFormat(begin, content):
            yield from schemas_in(content, before + begin if isinstance(begin, str) else before)
        case SequenceFormat(parts):
            for part in parts:
                yield from schemas_in(part, before)
                before += _fixed_text(part)
        case OrFormat(parts) | TriggeredTagsFormat(tags=parts) | TagsWithSeparatorFormat(tags=parts):
            for part in parts:
                yield from schemas_in(part, before)
        case OptionalFormat(part) | PlusFormat(part) | StarFormat(part) | RepeatFormat(content=part):
            yield from schemas_in(part, before)


def name_field(error: InvalidRequest, param: str) -> InvalidRequest:
    """Return the error about a schema with its `SchemaFormat.param`, if it has one."""
    if param:
        error.param = param
        error.args = (f"`{param}`: {error}", *error.args[1:])
    return error


def _fixed_text(form: Format) -> str:
    match form:
        case ConstStringFormat(value):
            return value
        case SequenceFormat(parts):
            return "".join(map(_fixed_text, parts))
        case OrFormat(parts):
            return _fixed_text(parts[0]) if parts else ""
        case _:
            return ""


def _schema(schema: str | bool | dict[str, Any]) -> bool | dict[str, Any]:
    return msgspec.json.decode(schema, type=bool | dict[str, Any]) if isinstance(schema, str) else schema
