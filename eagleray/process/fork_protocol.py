"""Messages between a process and its fork server: packets of msgpack on a socket pair, descriptors beside them."""

from __future__ import annotations

import msgspec

MAX_PACKET_BYTES = 1 << 16
MAX_DESCRIPTORS = 250
"""The kernel passes at most 253 descriptors with one packet."""

LABEL = "fork-server"
"""Last word of a fork server's command line."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, tag="fork"):
    """Request to fork a child. With it come the child's socket, its standard output and standard error, and the
    descriptors of `numbers`."""

    words: list[str]
    """Command line of the child, as that of one that is started fresh."""
    numbers: list[int]
    """Numbers that the child's further descriptors get."""


class ServerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The fork server has imported its modules."""


class ServerUnusable(msgspec.Struct, frozen=True, tag="unusable"):
    """The fork server cannot fork, and exits."""

    reason: str


class ChildForked(msgspec.Struct, frozen=True, tag="forked"):
    """The child runs, as a child of the process that asked for it."""

    pid: int


class ForkFailed(msgspec.Struct, frozen=True, tag="failed"):
    """No child runs."""

    reason: str


FromForkServer = ServerReady | ServerUnusable | ChildForked | ForkFailed
