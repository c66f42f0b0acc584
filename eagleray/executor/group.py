"""What differs between the ways to run workers."""

from __future__ import annotations

from typing import Protocol

from eagleray.messages.steps import Call, Reply
from eagleray.messages.workers import Topology


class WorkerGroup(Protocol):
    """The workers of one engine. Driven by its executor alone, from one thread.

    A group that exists is complete: every worker has said that it is there. Its factory raises, and leaves nothing
    behind, if one does not.
    """

    topology: Topology

    def send(self, call: Call) -> None:
        """Hand `call` to every worker. Raises as `check` does."""

    def receive(self, timeout: float) -> Reply | None:
        """The next reply of any worker; None after `timeout` seconds without one. Raises as `check` does."""

    def check(self) -> None:
        """Raises `WorkerLost` once a worker has died or fallen silent, whoever noticed it."""

    def close(self) -> None:
        """End the workers in bounded time (ask, terminate, kill); harmless when repeated."""
