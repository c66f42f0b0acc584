"""Clients of the user's own making, which were not spawned: they register, are attached, and leave when their lease is
over. docs/wire.md is for them."""

from __future__ import annotations

import asyncio
import contextlib

from eagleray.fleet.leases import Leases
from eagleray.fleet.membership_publisher import MembershipPublisher
from eagleray.identity import ClientId
from eagleray.log import get_logger
from eagleray.messages.lifecycle import Register, Stop
from eagleray.messages.membership import Left

logger = get_logger(__name__)


class ExternalClients:
    def __init__(self, instance: str, board: MembershipPublisher) -> None:
        self._board = board
        self._leases = Leases(instance, self._lapsed)

    def register(self, asked: Register) -> None:
        """Attach it, as somebody new: one that was known at that address is gone."""
        address, lease = asked.address, asked.lease
        if not 0 < lease < float("inf"):
            logger.warning("a client at %s asks for a lease of %s s: it is not attached", address, lease)
            return
        if former := self._leases.at(address):
            self._leases.end(former)
            self._board.leave(Left(former, "it has registered again"))
        client = self._leases.open(address, lease)
        try:
            self._board.attach(client, address, has_pulse=False)
        except Exception as error:  # the address is a stranger's: the mistake is, too
            logger.warning("a client asks to be reached at %s: it is not attached: %s", address, error)
            self._leases.end(client)

    def renew(self, client: ClientId) -> None:
        """It is still there."""
        self._leases.renew(client)

    def __contains__(self, client: ClientId) -> bool:
        return client in self._leases

    def expel(self, client: ClientId, cause: str) -> None:
        """It cannot stay: it is told so, and may register again."""
        self._leases.end(client)
        self._leave(client, cause)

    async def stop(self, stop: Stop) -> None:
        """Wait until all have left, for the grace at most. Who has finished says no more that it is there."""
        self._board.send_stop(self._leases, stop)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(stop.grace):
                await self._leases.none_left.wait()
        self.close()

    def close(self) -> None:
        """Wait for nobody any more."""
        self._leases.close()

    def _lapsed(self, client: ClientId, seconds: float) -> None:
        self._leave(client, f"it has not said for {seconds:g} s that it is there")

    def _leave(self, client: ClientId, cause: str) -> None:
        logger.info("%s is gone: %s", client.label, cause)
        self._board.expel(Left(client, cause, returns=False))
