"""External clients: they were not spawned, register themselves, and leave when their lease expires (docs/wire.md).

Owned by the supervisor, in its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eagleray.fleet import timeouts
from eagleray.fleet.membership import MembershipPublisher
from eagleray.identity import ClientId
from eagleray.log import get_logger
from eagleray.messages.lifecycle import Register, Stop
from eagleray.messages.membership import Left

logger = get_logger(__name__)

FIRST_INDEX = 1_000_000
"""Index of the first external client; API servers have smaller ones."""


@dataclass
class _Lease:
    address: str
    seconds: float
    due: float
    timer: asyncio.TimerHandle


class Leases:
    """Identities and leases of external clients.

    `on_expire(client, seconds)` is called, after the client was removed, when no `renew` came for `seconds`. Must be
    made in a running event loop.
    """

    def __init__(self, instance: str, on_expire: Callable[[ClientId, float], None]) -> None:
        self._on_expire = on_expire
        self._ids = (ClientId(instance, index) for index in itertools.count(FIRST_INDEX))
        self._loop = asyncio.get_running_loop()
        self._leases: dict[ClientId, _Lease] = {}
        self.empty = asyncio.Event()
        """Set while no client has a lease."""
        self.empty.set()

    def __contains__(self, client: object) -> bool:
        return client in self._leases

    def __iter__(self) -> Iterator[ClientId]:
        return iter(list(self._leases))

    def find(self, address: str) -> ClientId | None:
        """Return the client that has registered `address`."""
        return next((client for client, lease in self._leases.items() if lease.address == address), None)

    def open(self, address: str, seconds: float) -> ClientId:
        """Begin a lease. Returns the client's new identity."""
        client = next(self._ids)
        due = self._loop.time() + seconds
        timer = self._loop.call_at(due, self._check, client)
        self._leases[client] = _Lease(address, seconds, due, timer)
        self.empty.clear()
        return client

    def renew(self, client: ClientId) -> None:
        """Extend the client's lease. Unknown clients are ignored: they have been sent `Left`."""
        if lease := self._leases.get(client):
            lease.due = self._loop.time() + lease.seconds

    def remove(self, client: ClientId) -> None:
        self._leases.pop(client).timer.cancel()
        if not self._leases:
            self.empty.set()

    def close(self) -> None:
        """Remove all clients."""
        for client in self:
            self.remove(client)

    def _check(self, client: ClientId) -> None:
        lease, now = self._leases[client], self._loop.time()
        if now - lease.timer.when() > timeouts.LATE_TIMER_SECONDS:
            lease.due = now + lease.seconds  # this process did not run and could receive nothing
        if now < lease.due:
            lease.timer = self._loop.call_at(lease.due, self._check, client)
        else:
            self.remove(client)
            self._on_expire(client, lease.seconds)


class ExternalClients:
    """Attaches, renews and evicts external clients."""

    def __init__(self, instance: str, publisher: MembershipPublisher) -> None:
        self._publisher = publisher
        self._leases = Leases(instance, self._on_expired)

    def __contains__(self, client: ClientId) -> bool:
        return client in self._leases

    def register(self, request: Register) -> None:
        """Attach the client under a new identity. An earlier client at the same address leaves."""
        address, lease = request.address, request.lease
        if not 0 < lease < float("inf"):
            logger.warning("a client at %s asks for a lease of %s s: it is not attached", address, lease)
            return
        if former := self._leases.find(address):
            self._leases.remove(former)
            self._publisher.leave(Left(former, "it has registered again", returns=False))
        client = self._leases.open(address, lease)
        try:
            self._publisher.attach(client, address, has_heartbeat=False)
        except Exception as error:  # the address comes from outside, so it may be anything
            logger.warning("a client at %s cannot be reached and is not attached: %s", address, error)
            self._leases.remove(client)

    def renew(self, client: ClientId) -> None:
        """Extend the client's lease."""
        self._leases.renew(client)

    def evict(self, client: ClientId, cause: str) -> None:
        """Remove a client and send it `Left`; it may register again."""
        self._leases.remove(client)
        self._publish_left(client, cause)

    async def stop(self, stop: Stop) -> None:
        """Send `stop` and wait until all clients have left, for at most its grace. A client that has finished lets its
        lease expire."""
        self._publisher.send_stop(self._leases, stop)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(stop.grace):
                await self._leases.empty.wait()
        self.close()

    def close(self) -> None:
        """Remove all clients without a message."""
        self._leases.close()

    def _on_expired(self, client: ClientId, seconds: float) -> None:
        self._publish_left(client, f"it sent no `Alive` for {seconds:g} s")

    def _publish_left(self, client: ClientId, cause: str) -> None:
        logger.info("%s is gone: %s; it may register again", client.label, cause)
        self._publisher.evict(Left(client, cause, returns=False))
