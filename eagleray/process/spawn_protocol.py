"""What a parent hands to a child over the socket pair that the child is born with, and how frames travel on it."""

from __future__ import annotations

import socket
import struct

import msgspec

LENGTH = struct.Struct("<I")


class SpawnSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is to be."""

    target: str
    """`module:function`; called with (payload, parent)."""
    label: str
    log_level: str
    payload: bytes
    runtime_dir: str
    """Directory that belongs to the instance: an orphan removes it, since the parent no longer can."""


def write_frame(sock: socket.socket, frame: bytes) -> None:
    """Raises `OSError` if the other side is gone."""
    sock.sendall(LENGTH.pack(len(frame)) + frame)


def read_frame(sock: socket.socket) -> bytes | None:
    """The next frame, or None when the other side has closed or died."""
    header = _read_exactly(sock, LENGTH.size)
    return None if header is None else _read_exactly(sock, LENGTH.unpack(header)[0])


def _read_exactly(sock: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        try:
            more = sock.recv(count - len(data))
        except OSError:
            more = b""
        if not more:
            return None
        data += more
    return data
