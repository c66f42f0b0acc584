"""Connections between members on different hosts that break while both ends run on.

Messages in transit may be lost and none arrives later, so a member that waits for one would wait forever. One of the
two ends therefore has to leave, and the other one receives its `Left`. Every sender polls its own connections: members
report theirs, and those of the supervisor are polled here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from eagleray.fleet import timeouts
from eagleray.fleet.external_clients import ExternalClients
from eagleray.fleet.membership import MembershipPublisher
from eagleray.identity import ClientId, EngineId, MemberId


class ConnectionMonitor:
    """Polls until it is closed. `replace(member, reason)` is called for a spawned member that has to go. Must be made
    in a running event loop."""

    def __init__(
        self,
        publisher: MembershipPublisher,
        external_clients: ExternalClients,
        *,
        replace: Callable[[MemberId, str], None],
    ) -> None:
        self._publisher = publisher
        self._external_clients = external_clients
        self._replace = replace
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._timer = self._loop.call_later(timeouts.CONNECTION_POLL_SECONDS, self._poll)

    def on_broken(self, *ends: MemberId) -> None:
        """Handle a broken connection. `ends` is (sender, receiver), or (receiver,) for a connection of the
        supervisor."""
        self._loop.call_later(timeouts.DISCONNECT_GRACE_SECONDS, self._remove_one, ends)

    def close(self) -> None:
        self._is_closed = True
        self._timer.cancel()

    def _poll(self) -> None:
        self._timer = self._loop.call_later(timeouts.CONNECTION_POLL_SECONDS, self._poll)
        for member in self._publisher.pop_unreachable():
            self.on_broken(member)

    def _remove_one(self, ends: tuple[MemberId, ...]) -> None:
        """Evict an external client, or else replace an engine, whose requests resume on others."""
        if self._is_closed or not all(end in self._publisher for end in ends):
            return
        sender = "".join(f"from {end.label} " for end in ends[:-1])
        reason = f"the connection {sender}to {ends[-1].label} broke"
        for end in ends:
            if isinstance(end, ClientId) and end in self._external_clients:
                self._external_clients.evict(end, reason)
                return
        self._replace(next((end for end in ends if isinstance(end, EngineId)), ends[0]), reason)
