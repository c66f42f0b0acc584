"""Connections between members on different hosts that break while both ends live.

What was on its way may be lost, and nothing follows: whoever waits for it would wait for ever. So one of the two has to
go, by which the other is told what is lost. Every sender watches its own connections: members report theirs, the
supervisor's are watched here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from eagleray.fleet.external_clients import ExternalClients
from eagleray.fleet.membership_publisher import MembershipPublisher
from eagleray.identity import ClientId, EngineId, MemberId

WATCH_SECONDS = 1.0
"""Between looks at the supervisor's."""

NEWS_SECONDS = 3.0
"""A connection also breaks because a process ends, and that is known for certain a moment later."""


class ConnectionMonitor:
    """Watches until it is closed. Lives in the running event loop. `lose(member, reason)` is called for a member that
    was started here and has to go."""

    def __init__(
        self, board: MembershipPublisher, guests: ExternalClients, *, lose: Callable[[MemberId, str], None]
    ) -> None:
        self._board = board
        self._guests = guests
        self._lose = lose
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._timer = self._loop.call_later(WATCH_SECONDS, self._look)

    def broke(self, *ends: MemberId) -> None:
        """That from the first to the last, or from here to the only one."""
        self._loop.call_later(NEWS_SECONDS, self._separate, ends)

    def close(self) -> None:
        self._is_closed = True
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(WATCH_SECONDS, self._look)
        for member in self._board.take_unreachable():
            self.broke(member)

    def _separate(self, ends: tuple[MemberId, ...]) -> None:
        """A client that was not started here goes; else an engine, whose requests go on elsewhere."""
        if self._is_closed or not all(end in self._board for end in ends):
            return
        sender = "".join(f"from {end.label} " for end in ends[:-1])
        reason = f"the connection {sender}to {ends[-1].label} broke"
        for end in ends:
            if isinstance(end, ClientId) and end in self._guests:
                self._guests.expel(end, reason)
                return
        self._lose(next((end for end in ends if isinstance(end, EngineId)), ends[0]), reason)
