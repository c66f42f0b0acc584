"""Conversion of JSON values to the types of a struct's fields, as pydantic converts them for vLLM's servers.

Whole numbers may be given as texts or as numbers with a zero fraction, other numbers as texts, and truth values as 0, 1
or words. Texts are not made from numbers. Used for bodies that a strict decoder has refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from msgspec import inspect

TRUE_WORDS = frozenset({"1", "on", "t", "true", "y", "yes"})
FALSE_WORDS = frozenset({"0", "off", "f", "false", "n", "no"})

WHOLE_NUMBER = re.compile(r"\s*([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?\s*")
MAX_NUMBER_CHARS = 32
"""Length of a text that is read as a number. 64-bit integers have 20 digits, and long ones take quadratic time."""

MAX_CONVERTED_ITEMS = 2**16
"""Largest number of values in the lists and objects of one body that are converted."""

NUMBERS = (inspect.IntType, inspect.FloatType, inspect.BoolType)


class Coercion:
    """The conversions of the values of one body. Each takes microseconds: when a list or an object would exceed
    `MAX_CONVERTED_ITEMS`, it and all later ones are left as they are."""

    def __init__(self) -> None:
        self._num_items_left = MAX_CONVERTED_ITEMS

    def coerce(self, value: Any, kind: inspect.Type) -> Any:
        """Return `value` in the type `kind` where pydantic would convert it, and otherwise unchanged, for an error.

        Structs are left to the caller: their fields have types of their own.
        """
        if isinstance(kind, inspect.Metadata):
            return self.coerce(value, kind.type)
        if isinstance(kind, inspect.UnionType):
            return self._coerce_union(value, kind.types)
        if isinstance(kind, inspect.ListType) and isinstance(value, list) and self._may_convert(value):
            return [self.coerce(item, kind.item_type) for item in value]
        if isinstance(kind, inspect.DictType) and isinstance(value, dict) and self._may_convert(value):
            return {key: self.coerce(item, kind.value_type) for key, item in value.items()}
        if isinstance(kind, inspect.IntType):
            return _to_int(value)
        if isinstance(kind, inspect.FloatType):
            return _to_float(value)
        return _to_bool(value) if isinstance(kind, inspect.BoolType) else value

    def _may_convert(self, items: Collection[Any]) -> bool:
        self._num_items_left -= len(items)
        return self._num_items_left >= 0

    def _coerce_union(self, value: Any, kinds: tuple[inspect.Type, ...]) -> Any:
        """Convert to the first number type only if no type of the union takes the value as it is."""
        if value is None or any(_takes(kind, value) for kind in kinds):
            containers = (kind for kind in kinds if isinstance(value, list | dict) and _takes(kind, value))
            return next((self.coerce(value, kind) for kind in containers), value)
        for kind in kinds:
            plain = kind.type if isinstance(kind, inspect.Metadata) else kind
            if isinstance(plain, NUMBERS) and (changed := self.coerce(value, plain)) is not value:
                return changed
        return value


def _takes(kind: inspect.Type, value: Any) -> bool:
    """Whether a value of this Python type needs no conversion at its top."""
    match kind:
        case inspect.Metadata():
            return _takes(kind.type, value)
        case inspect.AnyType():
            return True
        case inspect.StrType():
            return isinstance(value, str)
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType():
            return type(value) is int
        case inspect.FloatType():
            return type(value) in (int, float)
        case inspect.ListType():
            return isinstance(value, list)
        case inspect.DictType() | inspect.StructType():
            return isinstance(value, dict)
        case _:
            return False


def alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    """Return the types of a union, or the only type."""
    if isinstance(kind, inspect.Metadata):
        return alternatives(kind.type)
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _to_int(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and len(value) <= MAX_NUMBER_CHARS and (match := WHOLE_NUMBER.fullmatch(value)):
        return int(match[1])
    return value


def _to_float(value: Any) -> Any:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and len(value) <= MAX_NUMBER_CHARS:
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _to_bool(value: Any) -> Any:
    if isinstance(value, str):
        word = value.lower()
        return True if word in TRUE_WORDS else False if word in FALSE_WORDS else value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return value


@cache
def field_types(struct: type[Any]) -> Mapping[str, inspect.Type]:
    """Return the types of a struct's fields by name. Kept, because evaluating its annotations takes milliseconds."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field.type for field in info.fields}
