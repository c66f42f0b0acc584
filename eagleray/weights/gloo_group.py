"""A gloo group between a trainer, rank 0, and workers, made as torch's own groups are: keys of the same names in the
same store, so that a trainer may also join it by `torch.distributed`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from eagleray.errors import ChannelClosed, DeadlineExceeded, InvalidRequest, TransferBroken
from eagleray.parallel.gloo_connections import GlooConnections

SENDER = 0
"""Rank of the trainer."""
CONNECT_INTERVAL_SECONDS = 0.05
"""Time between two attempts to reach the trainer's store."""
GROUP_NAME = "weights"
NUM_THREADS = 16
"""Threads of a group. Two are not enough for models of many small tensors: each broadcast begins with messages between
the ranks, which others have to overlap."""
BUCKET_BYTES = 64 * 2**20
"""Size of a bucket: large enough that its broadcast runs at full speed, and small enough that one bucket can be copied
while the next one is received."""


def reach_store(
    host: str, port: int, *, world_size: int, timeout: float, is_cancelled: Callable[[], bool]
) -> tuple[TCPStore, str]:
    """Connect to the trainer's store. Returns it with the address of this machine on the way there.

    Raises `DeadlineExceeded` if the trainer does not listen within `timeout` seconds, `TransferBroken` if
    `is_cancelled` returns True meanwhile, and `InvalidRequest` for a host that cannot exist.
    """
    deadline = time.monotonic() + timeout
    while True:
        if is_cancelled():
            raise TransferBroken(f"the transfer was closed while the trainer at {host}:{port} was awaited")
        try:
            with socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())) as probe:
                own_address = probe.getsockname()[0]
            break
        except UnicodeError:
            raise InvalidRequest(f"`master_address` {host!r:.80} is no name of a host", param="init_info") from None
        except OSError as error:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the trainer was not reached at {host}:{port} within {timeout:g} s: {error}"
                ) from error
            time.sleep(CONNECT_INTERVAL_SECONDS)
    remaining = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        # counts this rank, because the trainer's store may wait until it has `world_size` ranks
        store = TCPStore(host, port, world_size, is_master=False, timeout=remaining)
    except RuntimeError as error:
        raise TransferBroken(f"the store of the trainer at {host}:{port} does not answer: {error}") from error
    return store, own_address


def group_store(store: Store, name: str, device: str) -> Store:
    """Return the part of a store in which the ranks of torch's group `name` connect for tensors on such devices."""
    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))


class GlooGroup:
    """Rank `rank` of a group of `size`, which listens on `host`, an address of this machine. The constructor returns
    when all ranks are connected; it raises `DeadlineExceeded` or `TransferBroken`."""

    def __init__(self, store: Store, name: str, *, rank: int, size: int, host: str, timeout: float) -> None:
        self._peer = "the workers" if rank == SENDER else "the trainer"
        self._timeout = timeout
        try:
            self._connections = GlooConnections(
                group_store(store, name, "cpu"),
                f"the group {name!r}",
                rank=rank,
                size=size,
                host=host,
                timeout=timeout,
                num_threads=NUM_THREADS,
            )
        except ChannelClosed as error:
            raise TransferBroken(str(error)) from error

    def broadcast(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to broadcast a contiguous tensor on the host from rank 0. Returns a function that waits for the end and
        raises `TransferBroken`."""
        limit = timedelta(seconds=self._timeout)
        with self._broken_transfer():
            wait = self._connections.begin(
                "broadcast", lambda group: group.broadcast(tensor, SENDER, limit), self._timeout
            )

        def finish() -> None:
            with self._broken_transfer():
                wait()

        return finish

    def close(self) -> None:
        """Leave the group, from any thread: operations that this rank or others have begun fail. Idempotent."""
        self._connections.close()

    @contextmanager
    def _broken_transfer(self) -> Iterator[None]:
        try:
            yield
        except DeadlineExceeded as error:
            raise TransferBroken(f"{self._peer} took longer than {self._timeout:g} s for one broadcast") from error
        except ChannelClosed as error:
            raise TransferBroken(f"the connection to {self._peer} broke: {error}") from error
