"""Reads the values of a GGUF header from the bytes of a file, one after another.

Every count and length is compared with what is left of the file, and with limits that no published file reaches, before
memory is taken for it: a damaged file is refused at once, whatever its bytes say.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from struct import Struct
from typing import Any, NoReturn

import numpy as np

from eagleray.config.json_files import shown
from eagleray.errors import CheckpointError
from eagleray.hub.gguf.number_types import ValueType

MAX_HEADER_BYTES = 2**27
"""Bound of the whole header. Those of published models have less than 2**25 bytes."""
MAX_ITEMS = 2**21
"""Bound of the elements of all arrays together. A tokenizer has up to 300,000 tokens with types and scores, and twice
as many merges."""
MAX_TEXT_BYTES = 2**24
MAX_NAME_BYTES = 2**16
MAX_ENTRIES = 2**16
"""Bound of the number of fields, and of tensors."""
MAX_DIMENSIONS = 4

UINT32, UINT64 = Struct("<I"), Struct("<Q")
DTYPES: dict[int, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("u1"),
    ValueType.INT8: np.dtype("i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("u1"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}
"""Types of values that are numbers."""


class HeaderReader:
    """The place in a file up to which its header has been read. Every method raises `CheckpointError`, with the file,
    the field and its place, if the file does not have what it reads."""

    def __init__(self, path: Path, data: mmap.mmap, position: int) -> None:
        self.position = position
        """Byte of the file that is read next."""
        self.field = ""
        """The field or tensor being read, which errors mention."""
        self._path = path
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._items_left = MAX_ITEMS

    def fail(self, problem: str) -> NoReturn:
        """Raise the error of a damaged file."""
        raise damaged(self._path, f"{self.field}, at byte {self.position:,}: {problem}")

    def uint32(self) -> int:
        return self._unpack(UINT32)

    def uint64(self) -> int:
        return self._unpack(UINT64)

    def count(self, least_bytes: int, limit: int = MAX_ENTRIES) -> int:
        """Read a count of items and check that they fit into the rest of the header if each takes at least this many
        bytes."""
        return self._checked(self.uint64(), least_bytes, limit)

    def dimensions(self) -> list[int]:
        """Read the shape of a tensor, the contiguous dimension first."""
        count = self._checked(self.uint32(), UINT64.size, MAX_DIMENSIONS)
        found = [self.uint64() for _ in range(count)]
        if not count or not all(found):
            self.fail(f"the shape {found} has no numbers")
        return found

    def name(self, kind: str) -> str:
        """Read the name of a field or tensor, which errors name from now on. `kind`: what it is the name of."""
        self.field = f"the name of a {kind}"
        name = self._texts(1, MAX_NAME_BYTES)[0]
        self.field = f"the {kind} {shown(name)}"
        return name

    def value(self) -> Any:
        """Read a value behind its type. An array is a list."""
        kind = self.uint32()
        if kind != ValueType.ARRAY:
            return self._values(kind, 1)[0]
        kind = self.uint32()
        if kind == ValueType.ARRAY:
            self.fail("arrays of arrays are not supported")
        count = self.count(UINT64.size if kind == ValueType.STRING else 1, self._items_left)
        self._items_left -= count
        return self._values(kind, count)

    def _values(self, kind: int, count: int) -> list[Any]:
        if kind == ValueType.STRING:
            return self._texts(count, MAX_TEXT_BYTES)
        if (dtype := DTYPES.get(kind)) is None:
            self.fail(f"the type of the value has the number {kind}, which does not exist")
        begin = self._advance(count * dtype.itemsize)
        # a copy: no view of the mapped file may be left, in the frames of an error either, when it is closed
        numbers = np.frombuffer(self._data[begin : self.position], dtype)
        if kind == ValueType.BOOL:
            if (numbers > 1).any():
                self.fail(f"a value that is true or false has the byte {numbers.max()}")
            numbers = numbers.astype(bool)
        found: list[Any] = numbers.tolist()
        return found

    def _texts(self, count: int, max_bytes: int) -> list[str]:
        """Read texts behind their lengths. There may be hundreds of thousands, so the checks are written out here."""
        data, end, unpack = self._data, self._end, UINT64.unpack_from
        texts = []
        position = self.position
        try:
            for _ in range(count):
                begin = position + UINT64.size
                if begin > end:
                    self.position = position
                    self._fail_short(UINT64.size)
                (size,) = unpack(data, position)
                if size > max_bytes or size > end - begin:
                    self.position = begin
                    self._checked(size, 1, max_bytes)
                position = begin + size
                texts.append(str(data[begin:position], "utf-8"))
        except UnicodeDecodeError:
            self.position = begin
            self.fail("a text is not in UTF-8")
        self.position = position
        return texts

    def _unpack(self, form: Struct) -> int:
        number: int
        (number,) = form.unpack_from(self._data, self._advance(form.size))
        return number

    def _checked(self, count: int, least_bytes: int, limit: int) -> int:
        if (needed := count * least_bytes) > self._end - self.position:
            self._fail_short(needed)
        if count > limit:
            self.fail(f"{count:,} is more than the {limit:,} that are read")
        return count

    def _advance(self, num_bytes: int) -> int:
        """Return the place of the next bytes, and go beyond them."""
        begin = self.position
        if num_bytes > self._end - begin:
            self._fail_short(num_bytes)
        self.position += num_bytes
        return begin

    def _fail_short(self, needed: int) -> NoReturn:
        left = self._end - self.position
        end = "the header" if self._end < len(self._data) else "the file"
        self.fail(f"{needed:,} bytes are needed, but {left:,} are left of {end}")


def damaged(path: Path, problem: str) -> CheckpointError:
    """Return the error for a file whose bytes are no GGUF file."""
    return CheckpointError(
        f"{path}: is not a complete GGUF file ({problem}); it may be truncated or damaged: copy it again"
    )
