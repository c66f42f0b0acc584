"""Second reading of a body that its strict decoder has refused, field by field, by a table of `Fate`s.

Values are converted as pydantic does, fields without an effect are dropped, and every reason for a refusal is
collected. Holds no state of any request; driven by `body`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, inspect
from msgspec.structs import FieldInfo

from eagleray.errors import InvalidRequest, UnsupportedParameter
from eagleray.log import get_logger
from eagleray.messages.sampling import MAX_LOGIT_BIASES
from eagleray.server.coercion import Coercion, alternatives, field_types
from eagleray.server.field_fates import Fate, Feature

logger = get_logger(__name__)

T = TypeVar("T")

Explain = Callable[[str, str], InvalidRequest]
"""Makes the user's error from msgspec's message and the path of the field."""

MAX_NAME_CHARS = 64
MAX_SHOWN_NAMES = 16
"""Number of ignored fields that a header names; the others are counted."""
MAX_LOGGED_NAMES = 256
"""Number of ignored fields that the log of one process names."""

UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
NO_HEADER_CHARS = re.compile(r"[^\x21-\x2b\x2d-\x7e]")


class IgnoredFields:
    """Names of the fields of one body that have no effect. Long names are cut, and only the first ones are kept."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_more = 0
        self.is_complete = True
        """Whether there are no others, which were not looked at."""

    def add(self, name: str) -> None:
        if len(self.names) == MAX_SHOWN_NAMES:
            self.num_more += 1
        else:
            self.names.append(shown_name(name))

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def header(self) -> str:
        """The names as the value of a header."""
        more = f"and {self.num_more} more" if self.num_more else "" if self.is_complete else "and perhaps more"
        return ", ".join([*self.names, *([more] if more else [])])


class IgnoredFieldLog:
    """Logs each ignored field once in the life of a process."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._logged or len(self._logged) > MAX_LOGGED_NAMES:
                continue
            self._logged.add(name)
            if len(self._logged) > MAX_LOGGED_NAMES:
                logger.warning("more fields of requests are ignored; from now on they are not logged")
            else:
                logger.warning(
                    "field `%s` of a request is ignored, because it has no effect here; logged once for each field",
                    name,
                )


class Reading(NamedTuple, Generic[T]):
    """Result of reading one body."""

    body: T | None
    """The body without the fields that are refused or wrong; None if a required field is wrong or missing."""
    ignored: IgnoredFields
    reasons: list[InvalidRequest]


class LenientReader(Generic[T]):
    """Reads the decoded bodies of one route in the form of the struct `kind`, by the table `fates`."""

    def __init__(self, kind: type[T], fates: Mapping[str, Fate], explain: Explain) -> None:
        self._kind = kind
        self._fates = fates
        self._explain = explain
        names = field_types(kind).keys() | {name for name in fates if "." not in name}  # type: ignore[arg-type]  # mypy takes no class for hashable
        known: list[tuple[str, Any, Any]] = [(name, Any, UNSET) for name in sorted(names)]
        self._known = msgspec.json.Decoder(msgspec.defstruct("Known", known))
        self._only_known = msgspec.json.Decoder(msgspec.defstruct("OnlyKnown", known, forbid_unknown_fields=True))

    def known_fields(self, body: bytes | bytearray) -> tuple[dict[str, Any], str | None]:
        """Return the fields of a large body that are known by name, and the name of the first other one.

        The others are skipped without making an object for each, which would take a second for a million fields.
        Raises as msgspec does.
        """
        try:
            found, unknown = self._only_known.decode(body), None
        except msgspec.ValidationError as error:
            match = UNKNOWN_FIELD.match(str(error))
            found, unknown = self._known.decode(body), match[1] if match else None
        fields = msgspec.structs.asdict(found)
        return {name: value for name, value in fields.items() if value is not UNSET}, unknown

    def read(self, fields: Mapping[str, Any], unknown: str | None) -> Reading[T]:
        """Read the fields of a body. `unknown`: name of the first field that `known_fields` skipped, if any."""
        reading = _FieldReader(self._fates, self._explain)
        body = reading.read_struct(self._kind, fields, "")
        if unknown is not None:
            reading.ignored.add(unknown)
            reading.ignored.is_complete = False
        return Reading(body, reading.ignored, reading.all_reasons())


class _FieldReader:
    """Reads the fields of one body."""

    def __init__(self, fates: Mapping[str, Fate], explain: Explain) -> None:
        self.ignored = IgnoredFields()
        self._coerce = Coercion().coerce
        self._fates = fates
        self._explain = explain
        self._wrong: list[InvalidRequest] = []
        self._asked: dict[Feature, list[str]] = {}
        """Features that do not exist, with the fields that ask for them."""

    def all_reasons(self) -> list[InvalidRequest]:
        unsupported = [unsupported_feature(feature, names) for feature, names in self._asked.items()]
        return [*unsupported, *self._wrong]

    def read_struct(self, kind: type[Any], fields: Mapping[str, Any], prefix: str) -> Any:
        """Return the struct without its wrong fields, or None if a required field is wrong or missing."""
        types = field_types(kind)  # type: ignore[arg-type]  # mypy takes no class for hashable
        known = _fields(kind)  # type: ignore[arg-type]  # mypy takes no class for hashable
        values = {}
        for name, value in fields.items():
            if name in known:
                num_wrong = len(self._wrong)
                converted = self._convert(value, types[name], known[name].type, prefix + name)
                if converted is not None or len(self._wrong) == num_wrong:
                    values[name] = converted
            elif value is not None:
                self._drop(prefix + name, value, fields)
        required = {name for name, field in known.items() if field.required}
        missing = [name for name in known if name in required - fields.keys()]
        self._wrong += [InvalidRequest(f"`{prefix}{name}` is missing", param=prefix + name) for name in missing]
        if required - values.keys():
            return None
        return kind(**{known[name].name: value for name, value in values.items()})

    def _convert(self, value: Any, kind: inspect.Type, annotation: Any, path: str) -> Any:
        struct = _struct_of(kind)
        if struct is not None and isinstance(value, dict):
            num_wrong, num_ignored = len(self._wrong), len(self.ignored.names)
            try:
                return self.read_struct(struct, value, f"{path}.")
            except InvalidRequest as error:  # fields that contradict each other, or of which one is missing
                if len(self._wrong) == num_wrong:
                    unknown = " and ".join(f"`{name}`" for name in self.ignored.names[num_ignored:])
                    hint = f"; unknown here: {unknown}" if unknown else ""
                    self._wrong.append(InvalidRequest(f"{error}{hint}", param=path))
                return None
        try:
            try:
                return msgspec.convert(value, annotation, str_keys=True)
            except msgspec.ValidationError:
                return msgspec.convert(self._coerce(value, kind), annotation, str_keys=True)
        except msgspec.ValidationError as error:
            self._wrong.append(self._wrong_entry(value, kind, path) or self._explain(str(error), path))
        except RecursionError:
            self._wrong.append(InvalidRequest(f"`{path}` is nested too deeply", param=path))
        return None

    def _drop(self, path: str, value: Any, fields: Mapping[str, Any]) -> None:
        """Decide about a field that the struct does not have."""
        fate = self._fates.get(path)
        if fate is None:
            self.ignored.add(path)
        elif fate.kind == "accept" or self._is_off(value, fate, fields):
            return
        elif fate.kind == "ignore":
            self.ignored.add(path)
        else:
            self._asked.setdefault(fate.feature, []).append(path)

    def _wrong_entry(self, value: Any, kind: inspect.Type, path: str) -> InvalidRequest | None:
        """Return the error for the first wrong entry of a `value` that is an object and should be one by token ids."""
        by_token = next((one for one in alternatives(kind) if isinstance(one, inspect.DictType)), None)
        if by_token is None or not isinstance(by_token.key_type, inspect.IntType) or not isinstance(value, dict):
            return None
        for key, item in itertools.islice(value.items(), MAX_LOGIT_BIASES):
            if not isinstance(self._coerce(key, by_token.key_type), int):
                return InvalidRequest(f"`{path}`: the key {key!r:.40} is not a token id", param=path)
            if not isinstance(self._coerce(item, by_token.value_type), int | float):
                return InvalidRequest(f"`{path}`: the value of {key!r:.40} must be a number", param=path)
        return None

    def _is_off(self, value: Any, fate: Fate, fields: Mapping[str, Any]) -> bool:
        off = (*fate.off, fields.get(fate.equal_to) or 1) if fate.equal_to else fate.off
        return any(self._is_same(value, one) for one in off)

    def _is_same(self, value: Any, off: Any) -> bool:
        return bool(self._coerce(value, inspect.type_info(type(off))) == off)


def shown_name(name: str) -> str:
    """Return the name of a field for a header or the log: its beginning, in visible ASCII without commas."""
    cut = name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "..."
    return NO_HEADER_CHARS.sub("?", cut) or "?"


def unsupported_feature(feature: Feature, names: Iterable[str]) -> UnsupportedParameter:
    """Return the refusal of a feature that is asked for by fields of these names."""
    names = [*names]
    listed = ", ".join(f"`{name}`" for name in names)
    return UnsupportedParameter(
        f"this server does not support {feature.name} ({listed}): {feature.advice}", param=names[0]
    )


@cache
def _fields(kind: type[Any]) -> Mapping[str, FieldInfo]:
    """Return the fields of a struct by name."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def _struct_of(kind: inspect.Type) -> type[Any] | None:
    """Return the struct that a value of this type is or may be."""
    return next((one.cls for one in alternatives(kind) if isinstance(one, inspect.StructType)), None)
