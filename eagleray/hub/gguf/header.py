"""The header of a GGUF file: its fields, and the places of its tensors."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from eagleray.config.json_files import shown
from eagleray.errors import CheckpointError
from eagleray.hub.gguf.header_reader import HeaderReader, damaged
from eagleray.hub.gguf.number_types import TENSOR_TYPE_NAMES, TENSOR_TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
START_BYTES = 8
"""Bytes of the magic and the version."""
LEAST_FIELD_BYTES = 13
"""Bytes of a field without a name whose value is one byte: the length of the name, the type and the value."""
LEAST_TENSOR_BYTES = 32
"""Bytes of the entry of a tensor without a name and with one dimension."""
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The entry of a tensor."""

    kind: str
    shape: tuple[int, ...]
    """The contiguous dimension is the last one."""
    offset: int
    """Byte of the file at which the tensor begins."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return TENSOR_TYPES[self.kind].num_bytes(prod(self.shape))


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The fields and the tensors of one file, by their names in it."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The prefix of the fields that describe the model."""
        return str(self.fields.get("general.architecture"))

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {problem}")

    def of_model(self, name: str, default: Any = None) -> Any:
        """Return a field that describes the model, by its name behind the architecture's."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    def map_tensor(self, name: str) -> npt.NDArray[np.uint8]:
        """Map the bytes of a tensor, which are read from the file when they are used. They cannot be written to."""
        tensor = self.tensors[name]
        return np.memmap(self.path, np.uint8, "r", tensor.offset, (tensor.num_bytes,))

    def texts(self, name: str) -> list[str]:
        """Return a field that must be a list of texts."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            self.fail(f"`{name}` must be a list of texts, but it is {shown(value)}")
        return value

    def numbers(self, name: str, count: int) -> list[Any]:
        """Return a field that must be a list of `count` numbers."""
        value = self.fields.get(name)
        if not isinstance(value, list) or len(value) != count or any(isinstance(number, str) for number in value[:1]):
            self.fail(f"`{name}` must be a list of {count} numbers, but it is {shown(value)}")
        return value


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file. Raises `CheckpointError` if it is no complete one, or is one of several parts, or
    has tensors of a type that is not read."""
    try:
        with path.open("rb") as file:
            _check_start(path, file.read(START_BYTES))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, HeaderReader(path, data, START_BYTES), len(data))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _check_start(path: Path, start: bytes) -> None:
    """Check the bytes that every GGUF file begins with, and the version of the format."""
    magic, version = start[: len(MAGIC)], start[len(MAGIC) :]
    if magic != MAGIC:
        raise damaged(path, f"it begins with {magic!r} in place of {MAGIC!r}")
    if len(start) < START_BYTES:
        raise damaged(path, f"it ends after {len(start)} bytes")
    if int.from_bytes(version, "little") in VERSIONS:
        return
    if int.from_bytes(version, "big") in VERSIONS:
        raise CheckpointError(f"{path}: has big-endian numbers, which are not supported; convert it to little-endian")
    raise CheckpointError(
        f"{path}: has the version {int.from_bytes(version, 'little')} of the format GGUF; supported are "
        f"{' and '.join(map(str, VERSIONS))}; convert the model again, or take another file"
    )


def _read(path: Path, reader: HeaderReader, file_size: int) -> GgufHeader:
    reader.field = "the number of tensors"
    num_tensors = reader.count(LEAST_TENSOR_BYTES)
    reader.field = "the number of fields"
    num_fields = reader.count(LEAST_FIELD_BYTES)
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        if (name := reader.name("field")) in fields:
            reader.fail("it is there a second time")
        fields[name] = reader.value()
    tensors: dict[str, GgufTensor] = {}
    header = GgufHeader(path, fields, tensors)
    if (num_parts := fields.get("split.count", 1)) not in (0, 1):
        header.fail(f"is one of {shown(num_parts)} parts of a model; merge them with `llama-gguf-split --merge`")
    alignment = _alignment(header)
    for _ in range(num_tensors):
        if (name := reader.name("tensor")) in tensors:
            reader.fail("it is there a second time")
        tensors[name] = _read_tensor(header, reader, name, alignment)
    data_begin = -(-reader.position // alignment) * alignment
    for name, tensor in tensors.items():
        tensors[name] = replace(tensor, offset=data_begin + tensor.offset)
    _check_places(header, file_size)
    return header


def _alignment(header: GgufHeader) -> int:
    """Return the number of which the places of tensors are multiples."""
    value = header.fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or value < 1 or value & (value - 1):
        header.fail(f"`general.alignment` must be a power of two, but it is {shown(value)}")
    return value


def _read_tensor(header: GgufHeader, reader: HeaderReader, name: str, alignment: int) -> GgufTensor:
    """Return the entry of a tensor with the offset that is stored, which begins behind the header."""
    shape = tuple(reversed(reader.dimensions()))
    number, offset = reader.uint32(), reader.uint64()
    kind = TENSOR_TYPE_NAMES.get(number, f"number {number}")
    if kind not in TENSOR_TYPES:
        header.fail(f"tensor {shown(name)} is of the type {kind}; supported are {', '.join(TENSOR_TYPES)}")
    if shape[-1] % (size := TENSOR_TYPES[kind].block_size):
        reader.fail(f"its rows have {shape[-1]:,} numbers, which are not whole blocks of {size}")
    if offset % alignment:
        reader.fail(f"its offset {offset:,} is no multiple of the alignment {alignment:,}")
    return GgufTensor(kind, shape, offset)


def _check_places(header: GgufHeader, file_size: int) -> None:
    """Check that all tensors lie within the file, apart from each other."""
    end = 0
    for name, tensor in sorted(header.tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise damaged(header.path, f"the tensor {shown(name)} begins within another one, at byte {tensor.offset:,}")
        end = tensor.offset + tensor.num_bytes
        if end > file_size:
            raise damaged(
                header.path, f"the tensor {shown(name)} ends at byte {end:,}, but the file has {file_size:,} bytes"
            )
