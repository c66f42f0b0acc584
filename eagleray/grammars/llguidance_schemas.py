"""JSON schemas in the form that llguidance follows as the specification says.

Where it would follow a schema differently, the schema is rewritten or refused here. llguidance itself refuses keywords
that it does not have. Formats that the specification does not define are annotations, so they have no effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from math import inf, lcm
from typing import Any, NoReturn, TypeGuard

from eagleray.errors import InvalidRequest
from eagleray.grammars.ecma_regex import CONTROLS, to_rust
from eagleray.grammars.llguidance_errors import GrammarTooLarge
from eagleray.messages.grammars import PARAM

DRAFTS = (
    "http://json-schema.org/draft-04/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-07/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
)
DRAFTS_WITHOUT_SIBLINGS = DRAFTS[:3]
"""Drafts that ignore every keyword beside `$ref`."""

NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has schemas by name."""
VALUES = ("const", "enum")
ANNOTATIONS = ("title", "description", "default", "examples", "example", "$comment")
EXTENSION_PREFIX = "x-"
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # Python and JavaScript have no year 0
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
PATTERNS_OF_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
"""Formats that llguidance follows loosely: it has February 29 in every year, and a leap second in every minute."""

FORMATS = ("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""Formats that llguidance follows."""
UNSUPPORTED_FORMATS = (
    "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer",
    "uri-reference", "uri-template",
)  # fmt: skip

OPTIONS = {"json_allowed_escapes": 'nrbtf\\"'}
"""Options of llguidance, which take the place of those in a schema. Without `u`, a text has one form in JSON, so that a
free property cannot have the name of a named one."""

REPEATED_CLASS = re.compile(r"(?P<class>\[[^\[\]&~^-]+\]|\\s| )(?:\*|\{0,(?P<most>[1-9][0-9]*)\})")
"""A pattern of white space that may be empty: a class of characters, repeated."""

MAX_SOURCE_CHARACTERS = 2**20
MAX_CHARACTERS = 2**18
"""Bound of a schema without its annotations. A larger one takes llguidance a second or more."""
MAX_DEPTH = 100
MAX_PATTERN_PAIRS = 10_000
"""Bound of the pairs of `patternProperties` of an object, which llguidance compares, in all objects together."""
MAX_SHOWN = 100
"""Characters of a place or a pattern in an error."""
MAX_MULTIPLE = 2**32
"""llguidance computes common multiples with 32 bits, without a check."""


def prepare_schema(source: str, whitespace: str) -> str:
    """Return a schema that llguidance follows as the specification says, with its options. `whitespace`: see `Grammar`.
    Raises `InvalidRequest`, with the keyword and its place, for a schema that it would not follow."""
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise GrammarTooLarge(f"the JSON schema has more than {MAX_SOURCE_CHARACTERS} characters", param=PARAM)
    try:
        schema = _prepare_root(_parse(source)) | {"x-guidance": OPTIONS | _whitespace_options(whitespace)}
        prepared = json.dumps(schema, default=float)
    except RecursionError:
        raise GrammarTooLarge("the JSON schema is nested too deeply", param=PARAM) from None
    if len(prepared) > MAX_CHARACTERS:
        raise GrammarTooLarge(
            f"the JSON schema has more than {MAX_CHARACTERS} characters without titles, descriptions and examples",
            param=PARAM,
        )
    return prepared


def place_of_keyword(schema: Any, keywords: Collection[str], place: str = "#") -> str | None:
    """Return where a schema, or one in it, has one of the keywords, as a JSON pointer, or None if nothing has one.
    Names of properties, and values of `const` and `enum`, are no keywords."""
    if isinstance(schema, dict) and not schema.keys().isdisjoint(keywords):
        return place
    found = (place_of_keyword(one, keywords, f"{place}/{name}") for name, one in _parts(schema))
    return next(filter(None, found), None)


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield what may be, or hold, schemas in a schema or a list, with its place in it."""
    if isinstance(schema, list):
        yield from ((str(number), one) for number, one in enumerate(schema))
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key in NAMED_SCHEMAS and isinstance(value, dict):
                yield from ((f"{key}/{name}", one) for name, one in value.items())
            elif key not in (*VALUES, *ANNOTATIONS):
                yield key, value


def _parse(source: str) -> Any:
    try:
        return json.loads(source, parse_float=_finite, parse_constant=_refuse_constant)
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema is not valid JSON: {error}", param=PARAM) from None


def _prepare_root(schema: Any) -> dict[str, Any]:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(
            "the JSON schema must be an object" + ", because no value satisfies false" * (schema is False), param=PARAM
        )
    prepared: dict[str, Any] = _Preparation(schema).prepared
    return prepared


def _whitespace_options(whitespace: str) -> dict[str, Any]:
    if not whitespace:
        return {"whitespace_flexible": False}
    # White space is optional for llguidance anyway, and masks with a pattern that matches the empty text take twice the
    # time. The repetition of one class is the usual form.
    if match := REPEATED_CLASS.fullmatch(whitespace):
        whitespace = match["class"] + ("+" if match["most"] is None else f"{{1,{match['most']}}}")
    return {"whitespace_pattern": whitespace}


class _Preparation:
    """The prepared form of one schema. `place` is a JSON pointer."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._draft = str(schema.get("$schema", DRAFTS[-1])).rstrip("#")
        self._multiples: list[Decimal] = []
        self._has_references = False
        self._num_pattern_pairs = 0
        self.prepared = self._prepare(schema, "#", 0)
        self._check_multiples()

    def _prepare(self, schema: Any, place: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise GrammarTooLarge(f"the JSON schema is nested more than {MAX_DEPTH} times", param=PARAM)
        if isinstance(schema, list):
            return [self._prepare(one, f"{place}/{number}", depth + 1) for number, one in enumerate(schema)]
        if not isinstance(schema, dict):
            return schema
        self._check(schema, place)
        prepared: dict[str, Any] = {}
        for key, value in schema.items():
            if key in ANNOTATIONS or key.startswith(EXTENSION_PREFIX) or (key == "uniqueItems" and value is False):
                continue
            if key in VALUES:
                prepared[key] = value
            elif key in NAMED_SCHEMAS and isinstance(value, dict):
                prepared[key] = {
                    _pattern(name, place) if key == "patternProperties" else name: self._prepare(
                        one, f"{place}/{key}/{name}", depth + 1
                    )
                    for name, one in value.items()
                }
            elif key == "pattern" and isinstance(value, str):
                prepared[key] = _pattern(value, place)
            elif key == "format" and isinstance(value, str):
                prepared |= self._format(value, schema, place)
            else:
                prepared[key] = self._prepare(value, f"{place}/{key}", depth + 1)
        return prepared

    def _check(self, schema: Mapping[str, Any], place: str) -> None:
        """Raise `InvalidRequest` for what llguidance would follow wrongly."""
        if str(schema.get("$schema", self._draft)).rstrip("#") not in DRAFTS:
            _refuse(place, f"`$schema` must be one of {', '.join(DRAFTS)}")
        if "$ref" in schema:
            self._has_references = True
            if ("$id" in schema or "id" in schema) and self._draft in DRAFTS_WITHOUT_SIBLINGS:
                _refuse(place, "`$id` beside `$ref` has no meaning before the draft 2019-09")
        for key in (*BOUNDS, *VALUES):
            for value in _scalars(schema.get(key)):
                if _is_number(value) and Decimal(repr(float(Decimal(value)))) != value:
                    _refuse(place, f"`{key}` has {value}, which is no number of 64 bits")
                if isinstance(value, str) and not CONTROLS.isdisjoint(value):
                    _refuse(place, f"`{key}` has a control character")
        patterns = schema.get("patternProperties")
        self._num_pattern_pairs += len(patterns) ** 2 if isinstance(patterns, dict) else 0
        if self._num_pattern_pairs > MAX_PATTERN_PAIRS:
            raise GrammarTooLarge("the JSON schema has too many `patternProperties`", param=PARAM)
        multiple = schema.get("multipleOf")
        if _is_number(multiple):
            if multiple <= 0:
                _refuse(place, f"`multipleOf` must be above 0, not {multiple}")
            self._multiples.append(Decimal(multiple))
        minimum, required = schema.get("minProperties"), schema.get("required")
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
        if _is_number(minimum) and minimum - len(names) > 1:
            _refuse(
                place,
                f"`minProperties` is {minimum}, but the names of properties that are not in `required` may repeat in a "
                "text, so at most one of them can be demanded",
            )

    def _format(self, name: str, schema: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return keywords in place of a `format`."""
        if name in UNSUPPORTED_FORMATS:
            _refuse(place, f"`format` {name} is not supported")
        if name not in PATTERNS_OF_FORMATS:
            return {"format": name} if name in FORMATS else {}
        pattern = {"pattern": PATTERNS_OF_FORMATS[name]}
        if "pattern" not in schema:
            return pattern
        others = schema.get("allOf")
        if isinstance(others, list):
            _refuse(place, f"`format` {name} beside both `pattern` and `allOf` is not supported")
        return {"allOf": [pattern | {key: schema[key] for key in ("type",) if key in schema}]}

    def _check_multiples(self) -> None:
        """Raise `InvalidRequest` if values of `multipleOf` that apply together have too large a common multiple."""
        if len(self._multiples) < 2 and not self._has_references:
            return
        scale = 10 ** max((_num_decimals(multiple) for multiple in self._multiples), default=0)
        scaled = [int(multiple * scale) for multiple in self._multiples]
        common = 1
        for multiple in scaled:
            common = lcm(common, multiple)
            if common * max(scaled) >= MAX_MULTIPLE:
                _refuse("#", "the common multiple of all `multipleOf` is too large")


def _scalars(value: Any) -> Iterator[Any]:
    """Yield the values in a JSON value that have no parts."""
    if isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _scalars(one)
    else:
        yield value


def _pattern(pattern: str, place: str) -> str:
    try:
        return to_rust(pattern)
    except ValueError as error:
        _refuse(place, f"the pattern {pattern[:MAX_SHOWN]} is not supported, because {error}")


def _is_number(value: Any) -> TypeGuard[int | Decimal]:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _num_decimals(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _refuse(place: str, reason: str) -> NoReturn:
    raise InvalidRequest(f"the JSON schema cannot be followed at {place[-MAX_SHOWN:]}: {reason}", param=PARAM)


def _finite(text: str) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:  # the exponent has 19 digits or more
        number = Decimal(inf)
    if abs(float(number)) == inf:
        raise ValueError(f"{text[:MAX_SHOWN]} is beyond 64 bits")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
