"""Requests that arrive before their client's `Joined`. Owned by the engine loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from eagleray.engine.timeouts import JOIN_TIMEOUT_SECONDS
from eagleray.identity import ClientId
from eagleray.messages.requests import CallWorkers, Generate


@dataclass
class _EarlyRequest:
    since: float
    requests: list[Generate | CallWorkers] = field(default_factory=list)


class EarlyRequests:
    """Keeps requests that overtake the supervisor's `Joined` of their client.

    They expire, since the client may have exited before it joined. Pure: callers pass the time.
    """

    def __init__(self) -> None:
        self._by_client: dict[ClientId, _EarlyRequest] = {}
        self.next_expiry = math.inf
        """Time before which `expire` has nothing to drop."""

    def keep(self, request: Generate | CallWorkers, now: float) -> None:
        self._by_client.setdefault(request.client, _EarlyRequest(now)).requests.append(request)
        self.next_expiry = min(self.next_expiry, now + JOIN_TIMEOUT_SECONDS)

    def pop(self, client: ClientId) -> list[Generate | CallWorkers]:
        """Remove and return the requests of a client that joined or left, in order of arrival."""
        early = self._by_client.pop(client, None)
        return [] if early is None else early.requests

    def abort(self, client: ClientId, request_ids: Sequence[str]) -> None:
        if early := self._by_client.get(client):
            early.requests = [
                one for one in early.requests if isinstance(one, CallWorkers) or one.request_id not in request_ids
            ]

    def expire(self, now: float) -> list[ClientId]:
        """Drop the requests of clients that have not joined in time, and return these clients."""
        late = [client for client, one in self._by_client.items() if now - one.since > JOIN_TIMEOUT_SECONDS]
        for client in late:
            del self._by_client[client]
        waiting_since = (one.since for one in self._by_client.values())
        self.next_expiry = min(waiting_since, default=math.inf) + JOIN_TIMEOUT_SECONDS
        return late
