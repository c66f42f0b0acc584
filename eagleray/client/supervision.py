"""The bond between a client and its supervisor: each is heard by the other, or counts as lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from eagleray.transport.heartbeat import HeartbeatSender


class Supervision:
    """`on_lost` is called once, in the event loop, with the cause."""

    def __init__(self, *, on_lost: Callable[[str], None]) -> None:
        self.is_lost = False
        self._on_lost = on_lost
        self._pulse: HeartbeatSender | None = None

    def start(self, ticket: bytes) -> None:
        """Be heard from now on. An empty ticket: the supervisor sees this process anyway."""
        if ticket:
            loop = asyncio.get_running_loop()

            def tell(seconds: float) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
                    loop.call_soon_threadsafe(self._fall_silent, seconds)

            self.close()
            self._pulse = HeartbeatSender.start(ticket, on_silent=tell)

    def lose(self, cause: str) -> None:
        """The supervisor is there no more, or cannot be reached. Only the first cause counts."""
        if not self.is_lost:
            self.is_lost = True
            self._on_lost(cause)

    def close(self) -> None:
        """Fall silent. Harmless when repeated."""
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None

    def _fall_silent(self, seconds: float) -> None:
        if self._pulse is not None:  # else it was closed meanwhile
            self.lose(f"the supervisor was not heard of for {seconds:.0f} s")
