"""What differs between the ways to run workers."""

from __future__ import annotations

from typing import Protocol

from eagleray.messages.steps import Call, Reply

__all__ = ["WorkerGroup"]


class WorkerGroup(Protocol):
    """The workers of one engine. Driven by its executor alone."""

    world_size: int

    def send(self, call: Call) -> None:
        """Hand `call` to every worker."""

    def receive(self, timeout: float) -> Reply | None:
        """The next reply of any worker; None after `timeout` seconds without one."""

    def close(self) -> None:
        """End the workers in bounded time; harmless when repeated."""
