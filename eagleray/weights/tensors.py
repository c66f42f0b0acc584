"""Descriptions of tensors that are sent, as an `update_info` has them, and their layout in buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagleray.errors import WeightsMismatch

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
    )
}
"""Dtypes of tensors that can be sent, by their names in `dtype_names`."""

MAX_DIMS = 8

FILE_BUCKET_BYTES = 2**30
"""Size of a bucket of tensors that are mapped and read when they are used."""

MAPPED_BUCKET_BYTES = 256 * 2**20
"""Size of a bucket of tensors that are in memory already."""

ALIGNMENT = 64
"""Alignment, in bytes, of tensors that are received into one buffer, or shared."""


@dataclass(frozen=True, slots=True)
class SentTensor:
    """Name, dtype and shape of a whole tensor that a trainer sends."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def describe(weights: Iterable[tuple[str, Tensor]]) -> list[SentTensor]:
    """Describe the tensors that a trainer is about to send."""
    return [SentTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]


def to_update_info(tensors: Sequence[SentTensor]) -> dict[str, Any]:
    """Return the fields of an `update_info` that every backend has."""
    return {
        "names": [tensor.name for tensor in tensors],
        "dtype_names": [dtype_name(tensor.dtype) for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }


def read_update_info(update_info: Mapping[str, Any]) -> list[SentTensor]:
    """Read the fields `names`, `dtype_names` and `shapes`. Raises `WeightsMismatch` if they are not as they should
    be."""
    names, dtypes, shapes = (_list(update_info, field) for field in ("names", "dtype_names", "shapes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise WeightsMismatch(
            f"update_info: there are {len(names)} `names`, {len(dtypes)} `dtype_names` and {len(shapes)} `shapes`; "
            "each tensor needs one of each"
        )
    return [
        SentTensor(_name(name), _dtype(name, dtype), _shape(name, shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def into_buckets(tensors: Iterable[SentTensor], num_bytes: int) -> Iterator[list[SentTensor]]:
    """Divide tensors into buckets, in their order. A bucket ends with the tensor by which it has more than
    `num_bytes`."""
    bucket: list[SentTensor] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor.num_bytes
        if size > num_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def bucket_bytes(bucket: Sequence[SentTensor]) -> int:
    """Return the size of a bucket, in which tensors follow each other without gaps."""
    return sum(tensor.num_bytes for tensor in bucket)


def aligned(num_bytes: int) -> int:
    """Return the bytes that an aligned tensor takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def pack_bucket(weights: Iterable[Tensor], out: Tensor) -> None:
    """Copy the bytes of `weights` into `out`, uint8, one after another."""
    begin = 0
    for tensor in weights:
        end = begin + tensor.nbytes
        _copy_bytes(as_bytes(tensor), out[begin:end])
        begin = end


def _copy_bytes(source: Tensor, out: Tensor) -> None:
    if source.device.type == out.device.type == "cpu":
        # in one thread: torch's threads would wait, spinning, for cores on which the bucket before is sent
        out.numpy()[:] = source.numpy()
    else:
        out.copy_(source)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 [tensor.nbytes]. Strides other than those of its shape cost a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def unpack_bucket(buffer: Tensor, bucket: Sequence[SentTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket, as views of `buffer` (uint8) where their address permits it."""
    begin = 0
    for tensor in bucket:
        end = begin + tensor.num_bytes
        yield tensor.name, view_as(buffer[begin:end], tensor)
        begin = end


def view_as(part: Tensor, tensor: SentTensor) -> Tensor:
    """Return the bytes `part`, uint8, as the tensor that they are. They are copied if they are not aligned."""
    if part.storage_offset() % tensor.dtype.itemsize != 0:
        part = part.clone()
    return part.view(tensor.dtype).view(tensor.shape)


def _list(update_info: Mapping[str, Any], field: str) -> list[Any]:
    value = update_info.get(field)
    if not isinstance(value, list | tuple):
        found = "is missing" if value is None else f"is a {type(value).__name__}"
        raise WeightsMismatch(f"update_info: `{field}` must be a list with an entry for each tensor, but it {found}")
    return list(value)


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise WeightsMismatch(f"update_info: an entry of `names` is {name!r:.80}; each must be a string")
    return name


def _dtype(name: Any, dtype: Any) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise WeightsMismatch(f"{name}: dtype {dtype!r:.50} cannot be received; {', '.join(DTYPES)} can")
    return found


def _shape(name: Any, shape: Any) -> tuple[int, ...]:
    is_shape = isinstance(shape, list | tuple) and all(type(size) is int and 0 <= size < 2**48 for size in shape)
    if not is_shape or len(shape) > MAX_DIMS:
        raise WeightsMismatch(
            f"{name}: {shape!r:.80} is no shape; up to {MAX_DIMS} sizes are expected, as [4096, 1024]"
        )
    return tuple(shape)
