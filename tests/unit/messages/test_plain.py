"""Plain data, packed and unpacked."""

from __future__ import annotations

import enum
import math
from datetime import date

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eagleray.messages.plain import pack, pack_arguments, unpack, unpack_arguments

INTEGERS = st.integers(-(2**63), 2**64 - 1)
KEYS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
ARRAYS = hnp.arrays(
    st.sampled_from(["?", "u1", "<i8", ">i4", "<f2", "<f4", ">f8", "<c8", "<U3", "S2", "<M8[s]", "<m8[us]"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def assert_same(got, sent):
    """Check that values are equal in value and type, with tuples as lists."""
    if isinstance(sent, np.ndarray):
        assert isinstance(got, np.ndarray)
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert got.tobytes() == sent.tobytes()
    elif isinstance(sent, list | tuple):
        assert type(got) is list
        assert len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)
    elif isinstance(sent, dict):
        assert [(type(key), key) for key in got] == [(type(key), key) for key in sent]
        for key in sent:
            assert_same(got[key], sent[key])
    elif isinstance(sent, float) and math.isnan(sent):
        assert math.isnan(got)
    else:
        assert (type(got), got) == (type(sent), sent)


@given(VALUES)
def test_pack_round_trip_is_equal(value):
    assert_same(unpack(pack(value)), value)


@given(st.lists(VALUES, max_size=3), st.dictionaries(st.text(max_size=5), VALUES, max_size=3))
def test_pack_arguments_round_trip_is_equal(args, kwargs):
    got = unpack_arguments(pack_arguments(args, kwargs))
    assert_same(list(got), [args, kwargs])


def test_pack_arguments_none_is_empty():
    assert unpack_arguments(pack_arguments((), None)) == ([], {})


def test_unpack_arrays_are_owned_and_writable():
    packed = pack([np.arange(5000.0), np.arange(6, dtype=np.int32).reshape(2, 3).T, np.float32([])])
    for array in unpack(packed):
        assert array.base is None
        assert array.flags.owndata
        assert array.flags.writeable
        assert array.flags.c_contiguous
    first = unpack(packed)[0]
    first += 1
    assert unpack(packed)[0][0] == 0


def test_pack_strided_view_is_copied():
    matrix = np.arange(24).reshape(4, 6)
    for view in (matrix.T, matrix[::2, ::-1], np.asfortranarray(matrix), np.broadcast_to(matrix[0], (3, 6))):
        assert np.array_equal(unpack(pack(view)), view)


class Colour(enum.IntEnum):
    RED = 3


class Name(enum.StrEnum):
    ADA = "ada"


def test_pack_numpy_scalars_become_plain():
    sent = [np.float64(0.5), np.float32(0.5), np.int64(7), np.bool_(True), np.str_("x"), Colour.RED, Name.ADA]
    assert_same(unpack(pack(sent)), [0.5, 0.5, 7, True, "x", 3, "ada"])


def looped():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1}, "value: a value of type builtins.set cannot be sent"),
        ([1, {"a": (2, object())}], r"value\[1\]\['a'\]\[1\]: a value of type builtins.object cannot be sent"),
        (date(2020, 1, 1), "value: a value of type datetime.date cannot be sent"),
        ({"x": bytearray(b"x")}, r"value\['x'\]: a value of type builtins.bytearray"),
        (1j, "value: a value of type builtins.complex"),
        ([2**64], r"value\[0\]: an int of more than 64 bits"),
        ([-(2**63) - 1], r"value\[0\]: an int of more than 64 bits"),
        (["\ud800"], r"value\[0\]: a str with half a surrogate pair"),
        ({"a": {(1, 2): 3}}, r"value\['a'\]: a dict with a key of type tuple"),
        ([np.array([object()])], r"value\[0\]: a ndarray of dtype object"),
        (np.zeros(2, [("a", "i4")]), "value: a ndarray of dtype"),
        (np.ma.array([1, 2], mask=[0, 1]), "value: a MaskedArray of dtype int64"),
        (looped(), "nested deeper than 64 levels, or a container that holds itself"),
    ],
)
def test_pack_value_not_plain_error_names_type_and_path(value, message):
    with pytest.raises(TypeError, match=message):
        pack(value)


def test_pack_arguments_not_plain_error_names_path():
    with pytest.raises(TypeError, match=r"args\[1\]: a value of type builtins.set cannot be sent"):
        pack_arguments([1, set()], {})
    with pytest.raises(TypeError, match=r"kwargs\['x'\]\[0\]: a value of type builtins.set cannot be sent"):
        pack_arguments([], {"x": [set()]})
    with pytest.raises(TypeError, match="kwargs: a name is a str, but one is 1"):
        pack_arguments([], {1: 2})
    with pytest.raises(TypeError, match="args: a list or a tuple is expected, but this is a str"):
        pack_arguments("one", {})
    with pytest.raises(TypeError, match="kwargs: a dict is expected, but this is a list"):
        pack_arguments([], [])
