"""Accepting connections from the socket that all API servers of an instance listen on, in turn with the others.

The first server that accepts gets a connection, so one that happens to be quicker would get all of a burst. Each
therefore waits a moment while another has fewer connections, and accepts the connections that are still there then.
Owned by the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import mmap
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from eagleray.log import get_logger
from eagleray.server.connections import Handshake, HttpConnections
from eagleray.server.timeouts import (
    ACCEPT_POLL_SECONDS,
    ACCEPT_YIELD_SECONDS,
    FREED_FILE_SECONDS,
    KEEPALIVE_IDLE_SECONDS,
    KEEPALIVE_INTERVAL_SECONDS,
    NO_FILES_SECONDS,
    RESERVED_SECONDS,
    STUCK_SERVER_SECONDS,
    TLS_SHUTDOWN_SECONDS,
)
from eagleray.server.tls import Certificates

logger = get_logger(__name__)

MAX_AT_ONCE = 16
"""Connections that are accepted before the event loop does anything else."""

OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


NUMBER_BYTES = struct.calcsize("d")
STAMP, COUNT, NUM_NUMBERS = range(3)
"""Positions of a server's numbers: when it last published that it accepts connections, and how many are open."""


class Published(NamedTuple):
    """The number of connections of another server."""

    num_connections: int
    stamp: float
    """Time in seconds at which the server published the number."""


class ConnectionCounts:
    """The number of open connections of each API server of an instance, which all of them see.

    A file that every server maps into its memory, and that a server of a higher index makes larger. A server writes
    only its own numbers, each of which is a machine word, so there is nothing to lock. `server`: index of the server
    that writes; the others take it for one that accepts nothing until it calls `set`. Raises `OSError` if there is no
    room for the file.
    """

    def __init__(self, path: Path, *, server: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        with contextlib.ExitStack() as stack:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, self._descriptor)
            # Without memory for the file, writing later would raise SIGBUS.
            os.posix_fallocate(self._descriptor, 0, (server + 1) * NUM_NUMBERS * NUMBER_BYTES)
            self._map()
            stack.pop_all()
        self.withdraw()

    def _map(self) -> None:
        self._memory = mmap.mmap(self._descriptor, 0)
        self._bytes = memoryview(self._memory)
        self._numbers = self._bytes.cast("d")

    def _unmap(self) -> None:
        self._numbers.release()
        self._bytes.release()
        self._memory.close()

    def set(self, count: int) -> None:
        """Publish that this server accepts and has `count` connections. Call it again within `STUCK_SERVER_SECONDS`."""
        start = self._server * NUM_NUMBERS
        self._numbers[start + COUNT] = count
        self._numbers[start + STAMP] = self._clock()

    def withdraw(self) -> None:
        """Publish that this server accepts no connections, so that others do not wait for it."""
        self._numbers[self._server * NUM_NUMBERS + STAMP] = -STUCK_SERVER_SECONDS

    def least_of_others(self) -> Published | None:
        """Return the numbers of the other server that accepts and has the fewest connections, or None if no other
        accepts."""
        if os.fstat(self._descriptor).st_size > len(self._bytes):  # servers were added
            self._unmap()
            self._map()
        oldest = self._clock() - STUCK_SERVER_SECONDS
        published = [
            Published(int(self._numbers[start + COUNT]), self._numbers[start + STAMP])
            for start in range(0, len(self._numbers), NUM_NUMBERS)
            if start != self._server * NUM_NUMBERS
        ]
        return min((one for one in published if one.stamp > oldest), key=lambda one: one.num_connections, default=None)

    def close(self) -> None:
        self.withdraw()
        self._unmap()
        os.close(self._descriptor)


class Turns:
    """Decides whether a server accepts a connection or leaves it to the server with the fewest, which may be stuck.

    Each time that the other one leaves a connection for `ACCEPT_YIELD_SECONDS` and publishes nothing meanwhile, this
    server accepts twice as many without waiting. So a server that is busy for a moment loses a few connections of a
    burst, and a stuck one delays none of them for long. Pure.
    """

    def __init__(self) -> None:
        self._stamp = 0.0
        """Time at which the other server published its number last, as far as this one has seen."""
        self._since: float | None = None
        """Time since which a connection has been left to the other server, or None."""
        self._granted = 1
        """Number of connections to accept after the next time that the other server leaves one."""
        self._left = 0
        """Number of connections that may still be accepted without waiting."""

    def may_accept(self, own: int, other: Published, now: float) -> bool:
        """Whether the server, which has `own` connections, accepts one at this time; otherwise it asks again."""
        if other.stamp != self._stamp:
            self._stamp, self._since, self._granted, self._left = other.stamp, None, 1, 0
        if own <= other.num_connections + other.num_connections // 16:
            self._since = None
            return True
        if self._left:
            self._left -= 1
            return True
        if self._since is None:
            self._since = now
        if now - self._since < ACCEPT_YIELD_SECONDS:
            return False
        self._since = None
        self._left, self._granted = self._granted - 1, 2 * self._granted
        return True


class Acceptor:
    """Accepts connections from `listener` between `start` and `close`. The caller closes `listener`.

    `make_protocol` makes a connection's protocol; its argument is whether the connection belongs to the reserve.
    `certificates`: those with which connections are opened, if the server speaks HTTPS.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        make_protocol: Callable[[bool], asyncio.Protocol],
        connections: HttpConnections,
        counts: ConnectionCounts,
        certificates: Certificates | None = None,
    ) -> None:
        self._listener = listener
        self._certificates = certificates
        self._make_protocol = make_protocol
        self._connections = connections
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._handshakes: set[Handshake] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._turns = Turns()
        self._is_closed = False

    def start(self) -> None:
        self._listener.setblocking(False)
        _configure(self._listener, self._connections.options.send_timeout)
        self._connections.on_closed = self.report
        self.report()
        self._watch()

    def close(self) -> None:
        """Stop accepting. Open connections stay open. Idempotent."""
        self._is_closed = True
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()
        self._connections.on_closed = None
        for handshake in self._handshakes:
            handshake.drop()
        self._counts.withdraw()

    def report(self) -> None:
        """Publish the number of connections to the other servers. Call it again within `STUCK_SERVER_SECONDS`."""
        if not self._is_closed:
            self._counts.set(len(self._connections))

    def _watch(self) -> None:
        self._loop.add_reader(self._listener, self._on_connection)

    def _unwatch(self) -> None:
        self._loop.remove_reader(self._listener)

    def _pause(self, seconds: float) -> None:
        self._unwatch()
        self._timer = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._watch()
        self._on_connection()

    def _on_connection(self) -> None:
        """Accept what has arrived, if it is this server's turn."""
        least = self._counts.least_of_others()
        if least is None:
            self._accept(MAX_AT_ONCE)
        elif self._turns.may_accept(len(self._connections), least, self._loop.time()):
            self._accept(1)
        else:
            self._pause(ACCEPT_POLL_SECONDS)

    def _accept(self, most: int) -> None:
        """Accept up to `most` connections. Another server may have been quicker."""
        accepted: list[tuple[socket.socket, bool]] = []
        try:
            while len(accepted) < most:
                connection, _ = self._listener.accept()
                accepted.append((connection, self._connections.admit()))
        except BlockingIOError:
            pass
        except OSError as error:  # any other error: the client has closed the connection already
            if error.errno in OUT_OF_FILES:
                self._on_no_files(error)
        if accepted:
            context = None if self._certificates is None else self._certificates.context
            if context is None:
                self._start(self._open(accepted))
            else:
                for connection, is_within_limit in accepted:
                    handshake = Handshake(connection, is_reserved=not is_within_limit)
                    self._connections.begin_handshake(handshake)
                    self._start(self._open_with_tls(handshake, context))
            self.report()

    def _start(self, opening: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _on_no_files(self, error: OSError) -> None:
        self._connections.warn(
            f"the system has nothing left for a further connection ({error.strerror}), {len(self._connections)} are "
            "open: raise its limits, or lower `max_connections`"
        )
        self._pause(FREED_FILE_SECONDS if self._connections.free_one() else NO_FILES_SECONDS)

    async def _open(self, accepted: list[tuple[socket.socket, bool]]) -> None:
        """Make transports for accepted sockets; the flag of each is whether it is within the limit."""
        for connection, is_within_limit in accepted:
            connection.setblocking(False)
            protocol = self._make_protocol(not is_within_limit)
            try:
                await self._loop.connect_accepted_socket(functools.partial(_same, protocol), connection)
            except OSError as error:
                logger.debug("a connection was closed before it got a transport: %s", error)
                connection.close()
                self._connections.arriving -= is_within_limit

    async def _open_with_tls(self, handshake: Handshake, context: ssl.SSLContext) -> None:
        """Make the transport for one accepted socket, which lasts until the client has ended its part of the handshake,
        or has taken too long for it."""
        seconds = self._connections.options.header_timeout
        protocol = self._make_protocol(handshake.is_reserved)
        self._handshakes.add(handshake)
        handshake.connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(
                functools.partial(_same, protocol),
                handshake.connection,
                ssl=context,
                ssl_handshake_timeout=min(seconds, RESERVED_SECONDS) if handshake.is_reserved else seconds,
                ssl_shutdown_timeout=TLS_SHUTDOWN_SECONDS,
            )
        except OSError as error:  # that of TLS is one too
            logger.debug("a connection ended before its handshake did: %s", error)
            handshake.connection.close()
            self._connections.arriving -= not handshake.is_reserved
            self.report()
        finally:
            self._handshakes.discard(handshake)
            self._connections.end_handshake(handshake)


def _same(protocol: asyncio.Protocol) -> asyncio.Protocol:
    return protocol


def _configure(listener: socket.socket, send_timeout: float) -> None:
    """Let the kernel find out that a client has vanished, because only the kernel sees acknowledgements.

    Connections inherit the options of the socket from which they were accepted.
    """
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
    # This also cuts a client that is there and reads nothing.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(send_timeout * 1000)))
