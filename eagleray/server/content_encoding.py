"""Compressed request bodies: gzip is inflated, within the limit of a body's size.

Holds no state; driven by the decoders of bodies.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from eagleray.errors import InvalidRequest
from eagleray.server.error_responses import UNSUPPORTED_ENCODING, RefusedRequest

GZIP = 16 + zlib.MAX_WBITS
"""Form of the data for zlib: the header and trailer of gzip."""

MAX_MEMBERS = 1024
"""Number of gzip files in a row that are read as one, as gzip itself does. Programs that compress in parallel send
several; millions of empty ones would take seconds."""

PIECE_BYTES = 2**20
"""Size of the pieces that are inflated at a time, about a millisecond of work."""


def is_gzip(encoding: str) -> bool:
    """Whether a body with this `Content-Encoding` is to be inflated. Raises `RefusedRequest` for others than gzip."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return False
    if name in ("gzip", "x-gzip"):
        return True
    raise RefusedRequest(
        f"this server reads bodies with `Content-Encoding: gzip` or without the header, but not {encoding[:100]!r}",
        UNSUPPORTED_ENCODING,
        {"accept-encoding": "gzip"},
    )


def inflate(data: bytes | bytearray, check_length: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the inflated pieces of `data`. `check_length` gets the length so far, and raises if it is too large.

    Raises `InvalidRequest` if `data` is not gzip, or not all of it.
    """
    view, start, length = memoryview(data), 0, 0
    for _ in range(MAX_MEMBERS):
        if start == len(view):
            return
        inflater = zlib.decompressobj(GZIP)
        while not inflater.eof:
            # A slice of the data, because zlib copies the rest of its input at each call.
            taken = view[start : start + PIECE_BYTES]
            if not taken:
                raise InvalidRequest("the body is gzip that ends too early")
            try:
                piece = inflater.decompress(taken, PIECE_BYTES)
            except zlib.error as error:
                raise InvalidRequest(f"the body is not gzip, as its header `Content-Encoding` says: {error}") from None
            start += len(taken) - len(inflater.unconsumed_tail) - len(inflater.unused_data)
            length += len(piece)
            check_length(length)
            yield piece
    if start < len(view):
        raise InvalidRequest(f"the body has more than {MAX_MEMBERS} members of gzip; send one")
