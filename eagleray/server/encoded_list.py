"""Lists that are encoded piece by piece while an answer is put together.

An answer may hold a million log-probabilities. To encode all of them at once would hold up everybody, and as Python
objects they would take ten times the memory of their JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

ENCODER = msgspec.json.Encoder()


class EncodedList:
    """A list of JSON, or with `is_msgpack` of msgpack, whose items are encoded as they are added."""

    def __init__(self, *, is_msgpack: bool = False) -> None:
        self._is_msgpack = is_msgpack
        self._pieces: list[bytes] = []
        self._length = 0

    def extend(self, items: Sequence[Any]) -> None:
        """Add these items."""
        if items:
            self._length += len(items)
            self._pieces.append(_msgpack_items(items) if self._is_msgpack else ENCODER.encode(items)[1:-1])

    def take(self) -> Any:
        """Return the list for a field of an answer, whatever the field's type is, and forget the items."""
        pieces, self._pieces = self._pieces, []
        if self._is_msgpack:
            return msgspec.Raw(b"".join([_msgpack_header(self._length), *pieces]))
        return msgspec.Raw(b"".join([b"[", b",".join(pieces), b"]"]))


def _msgpack_items(items: Sequence[Any]) -> bytes:
    return msgspec.msgpack.encode(items)[len(_msgpack_header(len(items))) :]


def _msgpack_header(length: int) -> bytes:
    """Return the bytes that precede the items of an array of that length."""
    if length < 2**4:
        return bytes([0x90 | length])
    return b"\xdc" + length.to_bytes(2) if length < 2**16 else b"\xdd" + length.to_bytes(4)
