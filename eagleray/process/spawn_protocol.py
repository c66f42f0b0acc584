"""Spec of a child process, and the framing on the socket pair that the child inherits."""

from __future__ import annotations

import signal
import socket
import struct

import msgspec

from eagleray.identity import ProcessId
from eagleray.log import LogSettings

LENGTH = struct.Struct("<I")

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to all its processes."""

GROUP_SIGNALS = (*TERMINAL_SIGNALS, signal.SIGTERM)
"""Signals that may reach all processes of an instance, SIGTERM by `timeout` or systemd, and that only the parent acts
on."""

EXIT_FRAME = b""
"""Frame by which a parent tells its child to exit."""


class SpawnSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Spec that a parent passes to its child."""

    target: str
    """`module:function`; called with (payload, parent)."""
    member: ProcessId
    log: LogSettings
    payload: bytes
    runtime_dir: str
    """Runtime directory of the instance, which an orphan removes because the parent no longer can; empty if the child
    must not remove it."""
    has_children: bool = False
    """Whether the process spawns others that import what it has imported. If it is a fork, it gets a fork server for
    them."""


def write_frame(sock: socket.socket, frame: bytes) -> None:
    """Write a frame. Raises `OSError` if the other side has exited."""
    sock.sendall(LENGTH.pack(len(frame)) + frame)


def read_frame(sock: socket.socket) -> bytes | None:
    """Read the next frame, or return None if the other side has closed its end or exited."""
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
