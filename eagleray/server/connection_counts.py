"""The number of open connections of each API server of an instance, for all of them to see.

A file of fixed size that every server maps into its memory. A server writes its own numbers alone, each of which is a
word of its own, so there is nothing to lock.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

NUMBER_BYTES = struct.calcsize("d")
STAMP, COUNT, NUM_NUMBERS = range(3)
"""Places of a server's numbers: when it was last known to accept connections, and how many are open."""

ALIVE_SECONDS = 2.5
"""A server that has written nothing for longer is stuck, stopped or dead: the others do not wait for it."""


class ConnectionCounts:
    """`server`: index of the server that writes. It counts nothing and accepts nothing until `set` is called.

    Raises `OSError` if there is no room for the file.
    """

    def __init__(
        self, path: Path, *, server: int, num_servers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        size = num_servers * NUM_NUMBERS * NUMBER_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # without memory for it, writing later would be a SIGBUS
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._bytes = memoryview(self._memory)
        self._numbers = self._bytes.cast("d")
        self._server = server
        self._num_servers = num_servers
        self._clock = clock
        self.withdraw()

    def set(self, count: int) -> None:
        """Publish that this server accepts, and has `count` connections. To be repeated within `ALIVE_SECONDS`."""
        start = self._server * NUM_NUMBERS
        self._numbers[start + COUNT] = count
        self._numbers[start + STAMP] = self._clock()

    def withdraw(self) -> None:
        """Publish that this server accepts no connections, so that others do not wait for it."""
        self._numbers[self._server * NUM_NUMBERS + STAMP] = -ALIVE_SECONDS

    def least_of_others(self) -> int | None:
        """The fewest connections that another server has which accepts; None if there is no such server."""
        oldest = self._clock() - ALIVE_SECONDS
        counts = [
            self._numbers[server * NUM_NUMBERS + COUNT]
            for server in range(self._num_servers)
            if server != self._server and self._numbers[server * NUM_NUMBERS + STAMP] > oldest
        ]
        return int(min(counts)) if counts else None

    def close(self) -> None:
        self.withdraw()
        self._numbers.release()
        self._bytes.release()
        self._memory.close()
