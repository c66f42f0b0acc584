"""The open HTTP connections of one API server, and the limits of their number and time.

Owned by the server's event loop. The acceptor asks `admit` before each connection; `watch` runs as a task beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from uvicorn.server import ServerState

from eagleray.config.serving import ServingConfig
from eagleray.errors import Unavailable
from eagleray.log import get_logger
from eagleray.process.malloc import malloc_trim
from eagleray.server.connection_limit import connection_limit
from eagleray.server.cross_origin import CrossOrigin
from eagleray.server.timeouts import (
    FULL_RETRY_SECONDS,
    NEW_CONNECTION_SECONDS,
    TICK_SECONDS,
    WARNING_INTERVAL_SECONDS,
)

if TYPE_CHECKING:
    from eagleray.server.http_protocol import HttpProtocol


logger = get_logger(__name__)

RESERVED_CONNECTIONS = 64
"""Number of connections beyond the limit, for routes that show the server's state."""

BODIES_IN_MEMORY = 4
"""Number of largest bodies (`max_request_bytes`) that all unfinished requests may hold together."""

SMALL_REQUEST_BYTES = 8192
"""Size of requests that are received even while larger ones have used up the memory for unfinished requests."""

TRIM_BYTES = 2**24
"""Size of all unfinished requests from which on memory is given back to the system afterwards."""


class Handshake:
    """A connection in the handshake of TLS, which has no protocol yet. `is_reserved`: whether it is of the reserve."""

    def __init__(self, connection: socket.socket, *, is_reserved: bool) -> None:
        self.connection = connection
        self.is_reserved = is_reserved

    def drop(self) -> None:
        """Have the handshake fail."""
        with contextlib.suppress(OSError):  # the client has closed the connection
            self.connection.shutdown(socket.SHUT_RDWR)


class HttpConnections:
    """The connections in `state`, which uvicorn's protocols enter. `open_paths`: routes of the reserve.

    `count_refusal` is called with the status of each answer to a request that did not reach the application.
    """

    def __init__(
        self,
        options: ServingConfig,
        state: ServerState,
        *,
        open_files: int,
        open_paths: Collection[str],
        count_refusal: Callable[[int], None],
    ) -> None:
        self.options = options
        self.max_connections = connection_limit(options.max_connections, open_files=open_files)
        self.max_unfinished_bytes = BODIES_IN_MEMORY * options.max_request_bytes
        """Limit of the bytes of requests that have not arrived completely, over all connections."""
        self.cross_origin = CrossOrigin(options)
        self.state = state
        self.open_paths = open_paths
        self.count_refusal = count_refusal
        self.is_leaving = False
        """Whether each connection is closed after its next answer, because other servers take over."""
        self.now = 0.0
        """Seconds that the event loop has run, counted in ticks, so that time in which it was stuck is not charged to
        clients."""
        self.waiting: dict[HttpProtocol | Handshake, float] = {}
        """Connections without a request whose headers have arrived, with the time since which; the first waits
        longest."""
        self.reserved: dict[HttpProtocol | Handshake, None] = {}
        """Connections beyond the limit, oldest first."""
        self.unfinished_bytes = 0
        """Bytes of all requests that have not arrived completely."""
        self._most_unfinished_bytes = 0
        """Maximum of `unfinished_bytes` since memory was given back."""
        self.arriving = 0
        """Number of connections that were accepted and have no transport yet, without those of the reserve that are
        not in a handshake."""
        self.on_closed: Callable[[], None] | None = None
        """Called when a connection has been closed."""
        shortest = min(options.header_timeout, options.body_timeout, options.keep_alive_timeout)
        self._tick_seconds = min(TICK_SECONDS, shortest / 4)
        self._warned_at = -WARNING_INTERVAL_SECONDS

    def __len__(self) -> int:
        return len(self.state.connections) + self.arriving

    def admit(self) -> bool:
        """Make room for a connection. Return whether it is within the limit; otherwise it belongs to the reserve.

        A connection within the limit counts in `arriving` until its protocol has a transport; a caller that closes it
        before must subtract it.
        """
        if len(self) - len(self.reserved) < self.max_connections:
            self.arriving += 1
            return True
        self.warn(
            f"{self.max_connections} connections are open, the most that option `max_connections` allows: "
            "new ones replace connections that wait for a request, or else get 503, except on "
            + ", ".join(sorted(self.open_paths))
        )
        if self._drop_waiting():
            self.arriving += 1
            return True
        if len(self.reserved) >= RESERVED_CONNECTIONS:
            self._drop_reserved()
        return False

    def begin_handshake(self, handshake: Handshake) -> None:
        """Count a connection that was admitted and begins a handshake of TLS as one that waits for a request."""
        if handshake.is_reserved:
            self.arriving += 1
            self.reserved[handshake] = None
        else:
            self.waiting[handshake] = self.now

    def end_handshake(self, handshake: Handshake) -> None:
        """Stop counting a handshake; the protocol, if it was made, counts the connection itself."""
        self.waiting.pop(handshake, None)
        self.reserved.pop(handshake, None)
        self.arriving -= handshake.is_reserved

    def free_one(self) -> bool:
        """Close a connection that can be spared. Return whether one was found."""
        return self._drop_waiting() or self._drop_reserved()

    def _drop_reserved(self) -> bool:
        for connection in self.reserved:
            self._drop(connection)
            return True
        return False

    def _drop_waiting(self) -> bool:
        """Close the connection that has waited longest for a request, if it waited long. Return whether one did."""
        for connection, since in self.waiting.items():
            if self.now - since < NEW_CONNECTION_SECONDS:
                break
            self._drop(connection)
            return True
        return False

    def full_error(self) -> Unavailable:
        """Return the error for a request on a connection of the reserve."""
        return Unavailable(
            f"all {self.max_connections} connections that this server keeps (its option `max_connections`) are "
            "in use; try again in a moment",
            retry_after=FULL_RETRY_SECONDS,
        )

    def forget(self, connection: HttpProtocol | Handshake) -> None:
        """Stop counting a connection that is closed, or about to be."""
        self.waiting.pop(connection, None)
        self.reserved.pop(connection, None)
        # Now, not in `connection_lost`, because another connection may be accepted before that.
        self.state.connections.discard(connection)
        if self.on_closed is not None:
            self.on_closed()

    def warn(self, text: str) -> None:
        """Log `text`, unless a warning was logged lately, because connections may arrive by the thousand."""
        now = time.monotonic()
        if now - self._warned_at >= WARNING_INTERVAL_SECONDS:
            self._warned_at = now
            logger.warning("%s", text)

    def has_room_for_large(self) -> bool:
        """Whether a request may continue of which more than `SMALL_REQUEST_BYTES` have arrived."""
        return self.unfinished_bytes <= self.max_unfinished_bytes

    async def watch(self, on_tick: Callable[[], None]) -> None:
        """Close connections that take too long, until cancelled. `on_tick` is called once a second or more often."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(self._tick_seconds)
            now = time.monotonic()
            # Bounded: after a pause (a stuck loop, a stopped process) bytes may have arrived that were not read yet.
            try:
                self.tick(min(now - before, 2 * self._tick_seconds))
            except Exception:  # the limits of time must stay in force for the other connections
                logger.exception(
                    "the check of connections for their time limits failed; it is repeated with the next tick"
                )
            before = now
            on_tick()

    def tick(self, seconds: float) -> None:
        """Advance the clock by `seconds`, and close the connections that are late."""
        self.now += seconds
        self._trim_memory()
        for connection in list(self.state.connections):
            connection.check_time()  # type: ignore[union-attr]

    def _trim_memory(self) -> None:
        """Give memory back to the system after unfinished requests took much of it, because glibc would keep it."""
        self._most_unfinished_bytes = max(self._most_unfinished_bytes, self.unfinished_bytes)
        if self._most_unfinished_bytes > TRIM_BYTES and self.unfinished_bytes < self._most_unfinished_bytes // 4:
            self._most_unfinished_bytes = self.unfinished_bytes
            malloc_trim()

    def _drop(self, connection: HttpProtocol | Handshake) -> None:
        self.forget(connection)
        connection.drop()
