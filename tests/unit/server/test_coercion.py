"""Conversion of JSON values, against the results of pydantic 2.13 for the same values and types."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from eagleray.server.coercion import MAX_CONVERTED_ITEMS, Coercion

WRONG = object()
"""Result of pydantic where it raises; the value stays, and msgspec refuses it."""

RESULTS: list[tuple[Any, Any, Any]] = [
    ("3", int, 3),
    (3.0, int, 3),
    ("3.0", int, 3),
    ("3.000", int, 3),
    (" 3 ", int, 3),
    ("+5", int, 5),
    ("-0", int, 0),
    ("03", int, 3),
    ("1_000", int, 1000),
    (True, int, 1),
    ("3.", int, WRONG),
    ("3.5", int, WRONG),
    (3.5, int, WRONG),
    ("1e3", int, WRONG),
    ("0x10", int, WRONG),
    ("٣", int, WRONG),
    ([3], int, WRONG),
    ("1.5", float, 1.5),
    ("1_0.5", float, 10.5),
    ("infinity", float, math.inf),
    (True, float, 1.0),
    (7, float, 7.0),
    ("x", float, WRONG),
    ("true", bool, True),
    ("TRUE", bool, True),
    ("yes", bool, True),
    ("on", bool, True),
    ("t", bool, True),
    ("1", bool, True),
    ("off", bool, False),
    ("n", bool, False),
    (1, bool, True),
    (0, bool, False),
    (1.0, bool, True),
    ("1.0", bool, WRONG),
    (" true", bool, WRONG),
    ("", bool, WRONG),
    (2, bool, WRONG),
    (5, str, WRONG),
    (True, str, WRONG),
    ("null", int | None, WRONG),
    (None, int | None, None),
    ("4", int | None, 4),
    (["1", 2.0, 3], list[int], [1, 2, 3]),
    ({"a": "1.5", "b": True}, dict[str, float], {"a": 1.5, "b": 1.0}),
    ("7", str | list[str] | None, "7"),
]


def coerce(value: Any, kind: inspect.Type) -> Any:
    return Coercion().coerce(value, kind)


@pytest.mark.parametrize(("value", "kind", "expected"), RESULTS)
def test_coerce_values_are_converted_as_by_pydantic(value, kind, expected):
    converted = coerce(value, inspect.type_info(kind))
    if expected is WRONG:
        assert converted == value
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(converted, kind)
    else:
        assert msgspec.convert(converted, kind) == expected
        assert type(msgspec.convert(converted, kind)) is type(expected)


def test_coerce_nan_of_a_text_is_a_float():
    assert math.isnan(coerce("nan", inspect.type_info(float)))


def test_coerce_long_texts_are_not_read_as_numbers():
    assert coerce("9" * 100_000, inspect.type_info(int)) == "9" * 100_000
    assert coerce("9" * 100_000, inspect.type_info(float)) == "9" * 100_000


def test_coerce_lists_and_objects_beyond_the_limit_are_left():
    coercion, numbers = Coercion(), inspect.type_info(list[int])
    half = ["1"] * (MAX_CONVERTED_ITEMS // 2)
    assert coercion.coerce([half, half], inspect.type_info(list[list[int]])) == [[1] * len(half), half]
    assert coercion.coerce(["1"], numbers) == ["1"]
    assert coercion.coerce({"a": "1"}, inspect.type_info(dict[str, int])) == {"a": "1"}
    assert coercion.coerce("1", inspect.type_info(int)) == 1
    assert Coercion().coerce(["1"] * MAX_CONVERTED_ITEMS, numbers) == [1] * MAX_CONVERTED_ITEMS
