"""Plain data as bytes: the arguments and results of a call of the workers, which belong to the user and have no schema.

Plain are None, bool, int (of 64 bits), float, str, bytes, list, tuple (which arrives as a list), dict, numpy arrays of
numbers, texts or times, and values of torch (`torch_values`), nested in any way. They are written as msgpack: a list of
buffers, then the value, in which an array or a tensor is an extension type that names its buffer. So large ones are
copied once into the message and once out of it. No pickle: reading the bytes never executes anything.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from eagleray.messages.arrays import Array, Frame
from eagleray.messages.torch_values import (
    CudaTensorHandle,
    TensorBytes,
    dtype_name,
    find_dtype,
    is_cuda_handle,
    is_dtype,
    is_size,
    is_tensor,
    make_size,
    make_tensor,
    tensor_bytes,
    why_not_sent,
)


class ValueKind(enum.IntEnum):
    """Code of an extension type."""

    ARRAY = 1
    """(dtype, shape, number of the buffer), with numpy's text for the dtype."""
    TENSOR = 2
    """As an array, with torch's name of the dtype."""
    DTYPE = 3
    """The name of a dtype of torch."""
    SIZE = 4
    """The numbers of a `torch.Size`."""
    CUDA_HANDLE = 5
    """The fields of a `CudaTensorHandle`."""


ARRAY_KINDS = "biufcmMSU"
"""dtypes that their `str` describes fully. Objects, records and void are none."""
MOST_BYTES = 2**32 - 1 - 2**16
"""Size limit of a value, with all that it contains: msgpack has 32 bits for a length, and headers take a little."""
PICKLED_HANDLES = "ipc_handles_pickled"
"""Key under which programs for other engines send pickled handles of CUDA memory over HTTP."""
MOST_DEPTH = 64
"""Depth beyond which containers are assumed to contain themselves."""

SIMPLE = frozenset({type(None), bool, float})
KEYS = (type(None), bool, int, float, str, bytes)

PACKED: msgspec.msgpack.Decoder[tuple[list[memoryview], msgspec.Raw]] = msgspec.msgpack.Decoder(
    tuple[list[memoryview], msgspec.Raw]
)
BUFFERED: msgspec.msgpack.Decoder[tuple[str, list[int], int]] = msgspec.msgpack.Decoder(tuple[str, list[int], int])
HANDLE = msgspec.msgpack.Decoder(CudaTensorHandle)


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
        return TypeError(f"{self}: {what} cannot be sent; plain data, numpy arrays and tensors can")


def pack(value: Any, *, name: str = "value") -> bytes:
    """Encode `value`. Raises `TypeError`, with the path from `name`, for a value that is not plain."""
    packing = _Packing()
    return packing.encode(packing.plain(value, ValuePath(name)), name)


def unpack(packed: bytes, *, as_torch: bool = True) -> Any:
    """Inverse of `pack`, except that tuples become lists. Arrays and tensors are owned and writable.

    Without `as_torch`, torch is not imported: a tensor becomes `TensorBytes`, a handle `CudaTensorHandle`, a dtype its
    name and a size a list.
    """
    buffers, value = PACKED.decode(packed)
    return msgspec.msgpack.decode(value, ext_hook=_Unpacking(buffers, as_torch))


def packed_list_length(packed: bytes) -> int | None:
    """Return the number of items of an encoded list; None if another value is encoded."""
    items = _packed_items(packed)
    return None if items is None else len(items[1])


def slice_packed_list(packed: bytes, start: int, stop: int) -> bytes:
    """Return the encoded list of these items of an encoded list, without decoding them."""
    items = _packed_items(packed)
    assert items is not None
    return msgspec.msgpack.encode((items[0], items[1][start:stop]))


def _packed_items(packed: bytes) -> tuple[list[memoryview], list[msgspec.Raw]] | None:
    buffers, value = PACKED.decode(packed)
    try:
        return buffers, msgspec.msgpack.decode(value, type=list[msgspec.Raw])
    except msgspec.ValidationError:
        return None


def pack_arguments(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Encode the arguments of a call. Raises `TypeError` like `pack`."""
    if not isinstance(args, list | tuple):
        raise TypeError(f"args: a list or a tuple is expected, but this is a {type(args).__name__}")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"kwargs: a dict is expected, but this is a {type(kwargs).__name__}")
    for key in kwargs or {}:
        if not isinstance(key, str):
            raise TypeError(f"kwargs: a name is a str, but one is {key!r:.50}")
    packing = _Packing()
    plain = [packing.plain(list(args), ValuePath("args")), packing.plain(dict(kwargs or {}), ValuePath("kwargs"))]
    return packing.encode(plain, "args")


def unpack_arguments(packed: bytes) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = unpack(packed)
    return args, kwargs


class _Packing:
    """Converts a value to types that msgpack has, and collects the buffers of its arrays and tensors."""

    def __init__(self) -> None:
        self._buffers: list[Frame] = []
        self._num_bytes = 0

    def encode(self, plain: Any, name: str) -> bytes:
        packed = msgspec.msgpack.encode(plain)
        if self._num_bytes + len(packed) > MOST_BYTES:
            raise TypeError(f"{name}: 4 GiB or more in all cannot be sent; send it in several calls")
        return msgspec.msgpack.encode((self._buffers, msgspec.Raw(packed)))

    def plain(self, value: Any, place: ValuePath) -> Any:
        """Convert `value`. Subclasses of plain types and numpy scalars lose their type."""
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
                return self._sequence(value, place)
            case dict():
                return self._dict(value, place)
            case np.ndarray():
                return self._array(value, place)
            case _ if is_tensor(value):
                return self._tensor(value, place)
            case _ if is_dtype(value):
                return _extension(ValueKind.DTYPE, dtype_name(value))
            case _:
                raise place.refusal(f"a value of type {type(value).__module__}.{type(value).__qualname__}")

    def _sequence(self, value: list[Any] | tuple[Any, ...], place: ValuePath) -> Any:
        _check_depth(place)
        if is_cuda_handle(value):
            return _cuda_handle(value[1], place)
        items = [self.plain(item, ValuePath(index, place)) for index, item in enumerate(value)]
        return _extension(ValueKind.SIZE, items) if is_size(value) else items

    def _dict(self, value: dict[Any, Any], place: ValuePath) -> dict[Any, Any]:
        _check_depth(place)
        if value.get(PICKLED_HANDLES) is not None:
            raise TypeError(
                f"{place}: `{PICKLED_HANDLES}` is refused, because reading a pickle executes what it contains: send "
                "`ipc_handles` from Python, or use backend `nccl` or `shm` over HTTP"
            )
        return {self._key(key, place): self.plain(item, ValuePath(key, place)) for key, item in value.items()}

    def _key(self, key: Any, place: ValuePath) -> Any:
        if not isinstance(key, KEYS):
            raise place.refusal(f"a dict with a key of type {type(key).__name__}")
        return self.plain(key, ValuePath(key, place))

    def _array(self, array: Array, place: ValuePath) -> msgspec.msgpack.Ext:
        if array.dtype.kind not in ARRAY_KINDS or isinstance(array, np.ma.MaskedArray):
            raise place.refusal(f"a {type(array).__name__} of dtype {array.dtype}")
        _check_size(array, array.nbytes, place)
        flat = np.ascontiguousarray(array).reshape(-1)
        buffer = flat.view(np.uint8).data if array.nbytes > 0 else b""
        return _extension(ValueKind.ARRAY, (array.dtype.str, array.shape, self._add(buffer)))

    def _tensor(self, tensor: Any, place: ValuePath) -> msgspec.msgpack.Ext:
        if (cause := why_not_sent(tensor)) is not None:
            raise place.refusal(cause)
        _check_size(tensor, tensor.nbytes, place)
        shape = tuple(tensor.shape)
        return _extension(ValueKind.TENSOR, (dtype_name(tensor.dtype), shape, self._add(tensor_bytes(tensor))))

    def _add(self, buffer: Frame) -> int:
        self._buffers.append(buffer)
        self._num_bytes += len(buffer)
        return len(self._buffers) - 1


class _Unpacking:
    """Makes a value of an extension type, as msgpack's hook for them."""

    def __init__(self, buffers: list[memoryview], as_torch: bool) -> None:
        self._buffers = buffers
        self._as_torch = as_torch

    def __call__(self, code: int, data: memoryview) -> Any:
        match code:
            case ValueKind.ARRAY:
                dtype, shape, number = BUFFERED.decode(data)
                return np.ndarray(tuple(shape), np.dtype(dtype), self._buffers[number]).copy()
            case ValueKind.TENSOR:
                dtype, shape, number = BUFFERED.decode(data)
                if self._as_torch:
                    return make_tensor(dtype, shape, self._buffers[number])
                return TensorBytes(f"torch.{dtype}", tuple(shape), bytes(self._buffers[number]))
            case ValueKind.DTYPE:
                name = msgspec.msgpack.decode(data, type=str)
                return find_dtype(name) if self._as_torch else f"torch.{name}"
            case ValueKind.SIZE:
                sizes = msgspec.msgpack.decode(data, type=list[int])
                return make_size(sizes) if self._as_torch else sizes
            case ValueKind.CUDA_HANDLE:
                handle = HANDLE.decode(data)
                return handle.to_torch() if self._as_torch else handle
            case _:
                raise msgspec.DecodeError(f"extension type {code} is unknown")


def _extension(kind: ValueKind, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(int(kind), msgspec.msgpack.encode(content))


def _cuda_handle(arguments: Any, place: ValuePath) -> msgspec.msgpack.Ext:
    try:
        return _extension(ValueKind.CUDA_HANDLE, CudaTensorHandle.of(arguments))
    except ValueError as error:  # msgspec.ValidationError is one
        raise TypeError(f"{place}: a handle of a CUDA tensor that torch did not make: {error}") from None


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
