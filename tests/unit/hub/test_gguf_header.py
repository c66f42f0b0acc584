"""The header of GGUF files: equal to what the `gguf` package reads, and refused by a sentence if bytes are damaged."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from eagleray.errors import CheckpointError
from eagleray.hub.gguf.header import GgufHeader, read_header
from eagleray.hub.gguf.header_reader import MAX_ITEMS, MAX_TEXT_BYTES
from eagleray.hub.gguf.number_types import TENSOR_TYPE_NAMES, TENSOR_TYPES, ValueType

NUMBERS = {
    "uint8": (0, 255),
    "int8": (-128, 127),
    "uint16": (0, 65_535),
    "int16": (-32_768, 32_767),
    "uint32": (0, 2**32 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint64": (0, 2**64 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "float32": (1e-6, -3.5),
    "float64": (1e300, 0.1),
}
TEXTS = ["", "a", "▁the", "日本語", "👋🏽\n", "x" * 300]


def write_file(path: Path, *, alignment: int | None = None, **options: Any) -> Path:
    """Write a file that has a value and an array of every type, and a tensor of each that is read."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for name, pair in NUMBERS.items():
        for number in pair:
            getattr(writer, f"add_{name}")(f"{name}.{number}", number)
        kind = gguf.GGUFValueType[name.upper()]
        writer.add_key_value(f"{name}s", list(pair) * 3, gguf.GGUFValueType.ARRAY, sub_type=kind)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_array("bools", [True, False, True])
    writer.add_string("text", "Grüße")
    writer.add_array("texts", TEXTS)
    generator = np.random.default_rng(0)
    for number, (name, kind) in enumerate(TENSOR_TYPES.items()):
        rows, columns = number % 3 + 1, kind.block_size * 3
        data = generator.integers(0, 256, (rows, kind.num_bytes(columns)), np.uint8)
        writer.add_tensor(f"blk.{number}", data, raw_shape=data.shape, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_the_package_reads(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields and the tensors as a `GgufHeader` has them."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {
        tensor.name: (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())), int(tensor.data_offset))
        for tensor in reader.tensors
    }
    return fields, tensors


def parts(header: GgufHeader) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors = {name: (tensor.kind, tensor.shape, tensor.offset) for name, tensor in header.tensors.items()}
    return dict(header.fields), tensors


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header_bytes(fields: list[bytes], tensors: list[bytes] = []) -> bytes:  # noqa: B006
    return struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields)) + b"".join(fields + tensors)


def refused(path: Path, data: bytes, sentence: str, *, size: int | None = None) -> None:
    """Check that a file of these bytes is refused. `size`: zeros follow up to it, which take no space on the disk."""
    with path.open("wb") as file:
        file.write(data)
        if size is not None:
            file.truncate(size)
    with pytest.raises(CheckpointError, match=sentence):
        read_header(path)


def test_tables_are_those_of_the_gguf_package():
    assert {kind.value: kind.name for kind in gguf.GGMLQuantizationType} == TENSOR_TYPE_NAMES
    assert {kind.name: kind.value for kind in gguf.GGUFValueType} == {kind.name: kind.value for kind in ValueType}
    for name, kind in TENSOR_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.block_size, kind.block_bytes)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_read_header_is_what_the_gguf_package_reads(version, alignment, tmp_path):
    path = write_file(tmp_path / "a.gguf", alignment=alignment)
    data = path.read_bytes()
    path.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
    header = read_header(path)
    assert parts(header) == as_the_package_reads(path)
    assert header.fields["texts"] == TEXTS
    for tensor in gguf.GGUFReader(path).tensors:
        assert header.map_tensor(tensor.name).tobytes() == tensor.data.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        header.map_tensor("blk.0")[0] = 1


def test_read_header_of_a_truncated_file_names_the_place(tmp_path):
    path = write_file(tmp_path / "a.gguf")
    data = path.read_bytes()
    last = max(read_header(path).tensors.values(), key=lambda tensor: tensor.offset)
    for size in [*range(4, last.offset, 7), last.offset + last.num_bytes - 1]:
        refused(path, data[:size], r"a.gguf: is not a complete GGUF file \(.*\d+ bytes.*\); it may be truncated")


def test_read_header_with_changed_bytes_is_refused_or_read_as_the_gguf_package_does(tmp_path):
    path, generator = write_file(tmp_path / "a.gguf"), random.Random(0)
    data = path.read_bytes()
    size = min(tensor.offset for tensor in read_header(path).tensors.values())
    outcomes = {True: 0, False: 0}
    for _ in range(1000):
        changed = bytearray(data)
        for _ in range(generator.choice((1, 1, 1, 2, 8))):
            changed[generator.randrange(size)] = generator.choice((0, 1, 255, generator.randrange(256)))
        path.write_bytes(changed)
        try:
            found = parts(read_header(path))
        except CheckpointError as error:
            assert str(error).startswith(f"{path}: ") and len(str(error)) < len(str(path)) + 400
            outcomes[False] += 1
        else:
            assert repr(found) == repr(as_the_package_reads(path))  # a NaN equals no other one
            outcomes[True] += 1
    assert min(outcomes.values()) > 100


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**20, 0), "the number of tensors, at byte 16: 1,048,576 is more than"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**20), "the number of fields, at byte 24: 1,048,576 is more than"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**20), "the name of a field, at byte 32: 1,048,576 is more than"),
        (header_bytes([field("a", 8, struct.pack("<Q", 2**25))]), f"'a', .* is more than the {MAX_TEXT_BYTES:,} that"),
        (header_bytes([field("a", 9, struct.pack("<IQ", 8, 2**23))]), f"'a', .* is more than the {MAX_ITEMS:,} that"),
        (header_bytes([field("a", 9, struct.pack("<IQ", 0, 2**23))]), "'a', .* 8,388,608 is more than"),
        (
            header_bytes([field("a", 9, struct.pack("<IQ", 8, 2**63))]),
            "bytes are needed, but .* left of the header",
        ),
        (header_bytes([], [text("a") + struct.pack("<I", 2**20)]), "the tensor 'a', .* is more than the 4 that"),
        (header_bytes([], [tensor("a", (2**62, 2**62))]), "the tensor 'a' ends at byte .*, but the file has"),
    ],
)
def test_read_header_takes_no_memory_for_counts_beyond_all_published_files(data, sentence, tmp_path):
    refused(tmp_path / "a.gguf", data, rf"is not a complete GGUF file \(.*{sentence}", size=2**35)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", r"not a complete GGUF file \(it begins with b'' in place of b'GGUF'\)"),
        (b"GGUF\x03", r"not a complete GGUF file \(it ends after 5 bytes\)"),
        (b"GGUF\x01" + bytes(99), "has the version 1 of the format GGUF; supported are 2 and 3; convert"),
        (b"GGUF\x00\x00\x00\x03" + bytes(99), "has big-endian numbers, which are not supported; convert it"),
        (header_bytes([field("a", 0, b"1")] * 2), "the field 'a', .*: it is there a second time"),
        (header_bytes([field("a", 13, bytes(99))]), "the field 'a', .*: the type of the value has the number 13"),
        (header_bytes([field("a", 9, struct.pack("<IQ", 9, 0))]), "the field 'a', .*: arrays of arrays are not"),
        (header_bytes([field("a", 7, b"\x02")]), "the field 'a', .*: a value that is true or false has the byte 2"),
        (header_bytes([field("a", 8, text(b"\xff"))]), "the field 'a', .*: a text is not in UTF-8"),
        (
            header_bytes([field("a", 9, struct.pack("<IQ", 5, 9) + bytes(35))]),
            "36 bytes are needed, but 35 are left",
        ),
        (header_bytes([field("general.alignment", 4, struct.pack("<I", 24))]), "must be a power of two, but it is 24"),
        (header_bytes([field("general.alignment", 8, text("32"))]), "must be a power of two, but it is '32'"),
        (header_bytes([field("split.count", 8, text("x"))]), "is one of 'x' parts of a model; merge them"),
        (header_bytes([], [tensor("t"), tensor("t", offset=32)]), "the tensor 't', .*: it is there a second time"),
        (header_bytes([], [tensor("t", ()) + bytes(64)]), r"the tensor 't', .*: the shape \[\] has no numbers"),
        (header_bytes([], [tensor("t", (8, 0)) + bytes(64)]), r"the tensor 't', .*: the shape \[8, 0\] has no numbers"),
        (header_bytes([], [tensor("t", (1,) * 5)]), "the tensor 't', .*: 5 is more than the 4 that are read"),
        (header_bytes([], [tensor("t", kind=77)]), "tensor 't' is of the type number 77; supported are F32"),
        (header_bytes([], [tensor("t", (48,), kind=8)]), "rows have 48 numbers, which are not whole blocks of 32"),
        (header_bytes([], [tensor("t", offset=16) + bytes(99)]), "offset 16 is no multiple of the alignment 32"),
        (header_bytes([], [tensor("t", offset=64) + bytes(99)]), "the tensor 't' ends at byte 160, but the file has"),
        (header_bytes([], [tensor("t", (16,)), tensor("u", offset=32)]) + bytes(99), "the tensor 'u' begins within"),
    ],
)
def test_read_header_refuses_bytes_that_are_no_header(data, sentence, tmp_path):
    refused(tmp_path / "a.gguf", data, f"^{tmp_path}/a.gguf: .*{sentence}")


def test_read_header_of_a_big_endian_file_of_the_package_is_refused(tmp_path):
    path = write_file(tmp_path / "a.gguf", endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(CheckpointError, match="has big-endian numbers"):
        read_header(path)
