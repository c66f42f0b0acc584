"""Clients that were not spawned: they have registered, and count as there for as long as they say so."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eagleray.identity import ClientId

FIRST_INDEX = 1_000_000
"""API servers have indices below it."""

LATE_SECONDS = 1.0
"""A timer that fires later than this: this process did not run, and could hear nobody."""


@dataclass
class _Lease:
    address: str
    seconds: float
    due: float
    timer: asyncio.TimerHandle


class Leases:
    """`on_lapse(client, seconds)` is called for a client that was not heard for the seconds of its lease; it is
    forgotten already. Lives in the running event loop."""

    def __init__(self, instance: str, on_lapse: Callable[[ClientId, float], None]) -> None:
        self._on_lapse = on_lapse
        self._ids = (ClientId(instance, index) for index in itertools.count(FIRST_INDEX))
        self._loop = asyncio.get_running_loop()
        self._leases: dict[ClientId, _Lease] = {}
        self.none_left = asyncio.Event()
        """Set while there is none."""
        self.none_left.set()

    def __contains__(self, client: object) -> bool:
        return client in self._leases

    def __iter__(self) -> Iterator[ClientId]:
        return iter(list(self._leases))

    def at(self, address: str) -> ClientId | None:
        """Who has registered that address."""
        return next((client for client, lease in self._leases.items() if lease.address == address), None)

    def open(self, address: str, seconds: float) -> ClientId:
        """A client's lease begins; who it is from now on."""
        client = next(self._ids)
        due = self._loop.time() + seconds
        timer = self._loop.call_at(due, self._check, client)
        self._leases[client] = _Lease(address, seconds, due, timer)
        self.none_left.clear()
        return client

    def renew(self, client: ClientId) -> None:
        """It was heard. Who is not known is nobody's concern: it was told that it has left."""
        if lease := self._leases.get(client):
            lease.due = self._loop.time() + lease.seconds

    def end(self, client: ClientId) -> None:
        """Forget it."""
        self._leases.pop(client).timer.cancel()
        if not self._leases:
            self.none_left.set()

    def close(self) -> None:
        for client in self:
            self.end(client)

    def _check(self, client: ClientId) -> None:
        lease, now = self._leases[client], self._loop.time()
        if now - lease.timer.when() > LATE_SECONDS:
            lease.due = now + lease.seconds
        if now < lease.due:
            lease.timer = self._loop.call_at(lease.due, self._check, client)
        else:
            self.end(client)
            self._on_lapse(client, lease.seconds)
