"""The bond between a client and its supervisor: each is heard by the other, or counts as lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from eagleray.transport import Pulse

__all__ = ["Supervision"]


class Supervision:
    """`on_silent` is called once, in the event loop, when the supervisor was not heard for too long; with seconds."""

    def __init__(self, *, on_silent: Callable[[float], None]) -> None:
        self.is_lost = False
        self._on_silent = on_silent
        self._pulse: Pulse | None = None

    def start(self, ticket: bytes) -> None:
        """Be heard from now on. An empty ticket: the supervisor sees this process anyway."""
        if ticket:
            loop = asyncio.get_running_loop()

            def tell(seconds: float) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
                    loop.call_soon_threadsafe(self._lose, seconds)

            self.close()
            self._pulse = Pulse.start(ticket, on_silent=tell)

    def close(self) -> None:
        """Fall silent. Harmless when repeated."""
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None

    def _lose(self, seconds: float) -> None:
        if self._pulse is not None:  # else it was closed meanwhile
            self.is_lost = True
            self._on_silent(seconds)
