"""Plain data as bytes: the arguments and results of a worker extension, which belong to the user and have no schema.

Plain are None, bool, int (of 64 bits), float, str, bytes, list, tuple (which arrives as a list), dict, and numpy arrays
of numbers, texts or times, nested in any way. They are written as msgpack, arrays as an extension type. No pickle:
reading the bytes never executes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from eagleray.messages.arrays import Array

ARRAY = 1
"""Code of the extension type: the length of a header in two bytes, the header (dtype, shape), the array's bytes."""
ARRAY_KINDS = "biufcmMSU"
"""dtypes that their `str` describes fully. Objects, records and void are none."""
HEADER_LENGTH_BYTES = 2
MOST_BYTES = 2**32 - 1 - 2**16
"""Size limit of an array, text or bytes: msgpack has 32 bits for a length, and an array's header takes a little."""
MOST_DEPTH = 64
"""Depth beyond which containers are assumed to contain themselves."""

SIMPLE = frozenset({type(None), bool, float})
KEYS = (type(None), bool, int, float, str, bytes)


class ValuePath:
    """Path of a value inside the packed data, formatted only for an error."""

    __slots__ = ("depth", "key", "parent")

    def __init__(self, key: Any, parent: ValuePath | None = None) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1

    def __str__(self) -> str:
        """Format the path: `args[0]['weights']`."""
        return str(self.key) if self.parent is None else f"{self.parent}[{self.key!r:.50}]"

    def refusal(self, what: str) -> TypeError:
        return TypeError(f"{self}: {what} cannot be sent; plain data and numpy arrays can")


def pack(value: Any, *, name: str = "value") -> bytes:
    """Encode `value`. Raises `TypeError`, with the path from `name`, for a value that is not plain."""
    return msgspec.msgpack.encode(_plain(value, ValuePath(name)))


def unpack(packed: bytes) -> Any:
    """Inverse of `pack`, except that tuples become lists. Arrays are owned and writable."""
    return msgspec.msgpack.decode(packed, ext_hook=_unpack_array)


def pack_arguments(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Encode the arguments of a call. Raises `TypeError` like `pack`."""
    if not isinstance(args, list | tuple):
        raise TypeError(f"args: a list or a tuple is expected, but this is a {type(args).__name__}")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"kwargs: a dict is expected, but this is a {type(kwargs).__name__}")
    for key in kwargs or {}:
        if not isinstance(key, str):
            raise TypeError(f"kwargs: a name is a str, but one is {key!r:.50}")
    return msgspec.msgpack.encode(
        (_plain(list(args), ValuePath("args")), _plain(dict(kwargs or {}), ValuePath("kwargs")))
    )


def unpack_arguments(packed: bytes) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = unpack(packed)
    return args, kwargs


def _plain(value: Any, place: ValuePath) -> Any:
    """Convert `value` to types that msgpack has. Subclasses of plain types and numpy scalars lose their type."""
    if type(value) in SIMPLE:
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        value = value.item()
    match value:
        case bool():
            return value
        case int():
            return _integer(value, place)
        case float():
            return float(value)
        case str():
            return _text(value, place)
        case bytes():
            _check_size(value, len(value), place)
            return bytes(value)
        case list() | tuple():
            _check_depth(place)
            return [_plain(item, ValuePath(index, place)) for index, item in enumerate(value)]
        case dict():
            _check_depth(place)
            return {_key(key, place): _plain(item, ValuePath(key, place)) for key, item in value.items()}
        case np.ndarray() if value.dtype.kind in ARRAY_KINDS and not isinstance(value, np.ma.MaskedArray):
            return _pack_array(value, place)
        case np.ndarray():
            raise place.refusal(f"a {type(value).__name__} of dtype {value.dtype}")
        case _:
            raise place.refusal(f"a value of type {type(value).__module__}.{type(value).__qualname__}")


def _key(key: Any, place: ValuePath) -> Any:
    if not isinstance(key, KEYS):
        raise place.refusal(f"a dict with a key of type {type(key).__name__}")
    return _plain(key, ValuePath(key, place))


def _check_depth(place: ValuePath) -> None:
    if place.depth >= MOST_DEPTH:
        raise TypeError(f"{place}: nested deeper than {MOST_DEPTH} levels, or a container that holds itself")


def _integer(value: int, place: ValuePath) -> int:
    if not -(2**63) <= value < 2**64:
        raise place.refusal("an int of more than 64 bits")
    return int(value)


def _text(value: str, place: ValuePath) -> str:
    try:
        _check_size(value, len(value) if value.isascii() else len(value.encode()), place)
    except UnicodeEncodeError:
        raise place.refusal("a str with half a surrogate pair") from None
    return str.__str__(value)  # an enum's own would be its name


def _check_size(value: Any, num_bytes: int, place: ValuePath) -> None:
    if num_bytes > MOST_BYTES:
        raise place.refusal(f"a {type(value).__name__} of 4 GiB or more")


def _pack_array(array: Array, place: ValuePath) -> msgspec.msgpack.Ext:
    _check_size(array, array.nbytes, place)
    header = msgspec.msgpack.encode((array.dtype.str, array.shape))
    length = len(header).to_bytes(HEADER_LENGTH_BYTES, "big")
    return msgspec.msgpack.Ext(ARRAY, b"".join((length, header, array.tobytes())))


def _unpack_array(code: int, data: memoryview) -> Array:
    if code != ARRAY:
        raise msgspec.DecodeError(f"extension type {code} is unknown")
    start = HEADER_LENGTH_BYTES + int.from_bytes(data[:HEADER_LENGTH_BYTES], "big")
    dtype, shape = msgspec.msgpack.decode(data[HEADER_LENGTH_BYTES:start])
    return np.ndarray(tuple(shape), np.dtype(dtype), data, offset=start).copy()
