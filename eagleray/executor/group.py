"""Protocol of the transport-specific part of an executor."""

from __future__ import annotations

from typing import Protocol

from eagleray.messages.steps import Call, Reply
from eagleray.messages.workers import Topology


class WorkerGroup(Protocol):
    """The workers of one engine. Driven by its executor alone, from one thread.

    A group that exists is complete: every worker has attached. Its factory cleans up and raises if one does not.
    """

    topology: Topology

    def send(self, call: Call) -> None:
        """Send `call` to every worker. Raises like `check`."""

    def receive(self, timeout: float) -> Reply | None:
        """Return the next reply of any worker, or None after `timeout` seconds. Raises like `check`."""

    def check(self) -> None:
        """Raise `WorkerLost` once a worker has exited or stopped sending heartbeats."""

    def close(self) -> None:
        """Stop the workers in bounded time (close the queue, terminate, kill). Idempotent."""
