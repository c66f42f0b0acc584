"""External clients: they were not spawned, register themselves, and leave when their lease expires (docs/wire.md).

Pure: owned by `FleetState`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from eagleray.fleet import timeouts
from eagleray.fleet.membership import Membership
from eagleray.fleet.turn import LeaseTimer, Turn
from eagleray.identity import FIRST_EXTERNAL_INDEX, ClientId, MemberId
from eagleray.log import get_logger
from eagleray.messages.lifecycle import Register
from eagleray.messages.membership import Left

logger = get_logger(__name__)


def is_external(member: MemberId) -> TypeGuard[ClientId]:
    """Whether the member is an external client."""
    return isinstance(member, ClientId) and member.index >= FIRST_EXTERNAL_INDEX


@dataclass
class Lease:
    address: str
    seconds: float
    due: float
    """Time at which the lease expires unless it is renewed."""


class ExternalClients:
    """Attaches, renews and evicts external clients."""

    def __init__(self, instance: str, turn: Turn, membership: Membership) -> None:
        self._turn = turn
        self._membership = membership
        self._ids = (ClientId(instance, index) for index in itertools.count(FIRST_EXTERNAL_INDEX))
        self._leases: dict[ClientId, Lease] = {}
        self._by_address: dict[str, ClientId] = {}

    def __contains__(self, client: object) -> bool:
        return client in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(list(self._leases))

    def register(self, request: Register) -> None:
        """Attach the client under a new identity. An earlier client at the same address leaves."""
        address, seconds = request.address, request.lease
        if not 0 < seconds < float("inf"):
            logger.warning("a client at %s asks for a lease of %s s: it is not attached", address, seconds)
            return
        if former := self._by_address.get(address):
            self._remove(former)
            self._membership.leave(Left(former, "it has registered again", returns=False))
        client = next(self._ids)
        due = self._turn.now + seconds
        self._leases[client], self._by_address[address] = Lease(address, seconds, due), client
        self._turn.timers.set(LeaseTimer(client), due)
        self._membership.attach(client, address, has_heartbeat=False)

    def on_not_connected(self, client: ClientId, reason: str) -> None:
        """Drop a client whose address, which comes from outside, may be anything."""
        if client in self._leases:
            address = self._remove(client)
            logger.warning("a client at %s cannot be reached and is not attached: %s", address, reason)
            self._membership.forget(client)

    def renew(self, client: ClientId) -> None:
        """Extend the client's lease. Unknown clients are ignored: they have been sent `Left`."""
        if lease := self._leases.get(client):
            lease.due = self._turn.now + lease.seconds

    def evict(self, client: ClientId, cause: str) -> None:
        """Remove a client and send it `Left`; it may register again."""
        self._remove(client)
        logger.info("%s is gone: %s; it may register again", client.label, cause)
        self._membership.evict(Left(client, cause, returns=False))

    def clear(self) -> None:
        """Remove all clients without a message."""
        for client in self:
            self._remove(client)

    def pass_time(self, client: ClientId, due: float) -> None:
        """Handle the timer of a lease, which was set for the time `due`."""
        lease, now = self._leases[client], self._turn.now
        if now - due > timeouts.LATE_TIMER_SECONDS:
            lease.due = now + lease.seconds  # this process did not run and could receive nothing
        if now < lease.due:
            self._turn.timers.set(LeaseTimer(client), lease.due)
        else:
            self.evict(client, f"it sent no `Alive` for {lease.seconds:g} s")

    def _remove(self, client: ClientId) -> str:
        lease = self._leases.pop(client)
        self._turn.timers.cancel(LeaseTimer(client))
        del self._by_address[lease.address]
        return lease.address
