"""Connections between ranks by gloo: made, waited for and closed.

gloo has two faults that callers must not see. When a rank exits at the moment at which an operation answers it, gloo
closes the connection and does not end the operation, which then waits until its time limit. And a group can be neither
closed nor dropped while an operation waits. So a rank that waits checks the connections itself: to send by a broken one
fails at once. And a receive that reaches its time limit makes gloo break all connections of the group, which ends what
waits for them; `GlooConnections.close` relies on it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.parallel.timeouts import CONNECTION_CHECK_SECONDS

CHECK_TAG = 2
"""Tag of what is sent to check a connection. No rank receives it."""

CLOSE_TAG = 3
"""Tag of the receive that breaks all connections. No rank sends by it."""


DEFAULT_NUM_THREADS = 2
"""Threads of a group, as torch's own groups have."""


def connect_gloo(
    store: Store,
    name: str,
    *,
    rank: int,
    size: int,
    host: str,
    timeout: timedelta,
    num_threads: int = DEFAULT_NUM_THREADS,
) -> ProcessGroupGloo:
    """Connect the ranks by gloo, listening on `host`, an address of this machine. `timeout` also limits operations, of
    which each of `num_threads` threads executes one at a time.

    Raises `DeadlineExceeded` after `timeout`, and `ChannelClosed` if a rank is gone. `name` is the group's, for errors.
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = num_threads
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # by default it listens on any address
    began = time.monotonic()
    try:
        return ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        seconds = timeout.total_seconds()
        if time.monotonic() - began < seconds:
            raise ChannelClosed(f"a rank of {name} is gone while they connect: {error}") from error
        raise DeadlineExceeded(
            f"the {size} ranks of {name} were not connected within {seconds:g} s: {error}"
        ) from error


class GlooConnections:
    """Connections of one rank to all others, made as `connect_gloo` does."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        rank: int,
        size: int,
        host: str,
        timeout: float,
        num_threads: int = DEFAULT_NUM_THREADS,
    ) -> None:
        self.rank, self.size = rank, size
        self._group: Any = connect_gloo(
            store,
            name,
            rank=rank,
            size=size,
            host=host,
            timeout=timedelta(seconds=timeout),
            num_threads=num_threads,
        )

    @property
    def group(self) -> Any:
        """The process group. Raises `ChannelClosed` if it was closed."""
        group = self._group
        if group is None:
            raise ChannelClosed("the group was closed")
        return group

    def begin(self, what: str, start: Callable[[Any], Any], timeout: float) -> Callable[[], None]:
        """Start an operation of all ranks, given the process group, and return a function that waits for its end.

        Either raises `ChannelClosed` when a rank is gone, which the error names, or the group is closed meanwhile, and
        `DeadlineExceeded` when the operation takes longer than `timeout` seconds. `what` is the operation, for errors.
        """
        deadline = time.monotonic() + timeout
        try:
            work: Work = start(self.group)
        except RuntimeError as error:
            raise self._failed(what, error) from error

        return lambda: self._wait(what, work, timeout, deadline)

    def close(self) -> None:
        """Close the connections, from any thread. Operations that wait for them end, on all ranks. Idempotent."""
        group, self._group = self._group, None
        if group is None:
            return
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, CLOSE_TAG).wait(timedelta(milliseconds=1))

    @property
    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _broken_ranks(self) -> list[int]:
        """Return the ranks whose connection is broken. Raises `ChannelClosed` if the group was closed."""
        group, broken = self.group, []
        for peer in self._peers:
            try:
                group.send([torch.empty(1)], peer, CHECK_TAG)
            except RuntimeError:
                broken.append(peer)
        return broken

    def _wait(self, what: str, work: Work, timeout: float, deadline: float) -> None:
        while True:
            # whole milliseconds as torch counts them: less than one would be a wait without a limit
            milliseconds = max(1, math.ceil(1000 * min(deadline - time.monotonic(), CONNECTION_CHECK_SECONDS)))
            began = time.monotonic()
            try:
                work.wait(timedelta(milliseconds=milliseconds))
                return
            except RuntimeError as error:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"{what}: has waited for {timeout:g} s") from error
                # An operation that fails at the end of a wait counts as running: its next wait fails at once.
                if time.monotonic() - began < milliseconds / 1000:
                    raise self._failed(what, error) from error
            if gone := self._broken_ranks():
                self._abandon(work)
                raise ChannelClosed(f"{what}: {_broken(gone)}")

    def _failed(self, what: str, error: RuntimeError) -> ChannelClosed:
        if self._group is None:
            return ChannelClosed(f"{what}: the group was closed")
        gone = self._broken_ranks()
        return ChannelClosed(f"{what}: {_broken(gone)}: {error}" if gone else f"{what}: {error}")

    def _abandon(self, work: Work) -> None:
        """Keep the group in a thread until an operation that gloo has not ended reaches its time limit. Whoever drops
        the group before would wait for that."""

        def hold(group: Any) -> None:
            with contextlib.suppress(RuntimeError):
                work.wait()
            del group

        threading.Thread(target=hold, args=(self._group,), name="gloo-abandoned", daemon=True).start()


def _broken(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"the connection to rank {ranks[0]} is broken"
    return f"the connections to ranks {', '.join(map(str, ranks))} are broken"
