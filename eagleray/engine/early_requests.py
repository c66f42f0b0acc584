"""What clients ask before the news of them has arrived. Owned by the engine's loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eagleray.identity import ClientId
from eagleray.messages.requests import CallWorkers, Generate

PATIENCE_SECONDS = 30.0


@dataclass
class _EarlyRequest:
    since: float
    asked: list[Generate | CallWorkers] = field(default_factory=list)


class EarlyRequests:
    """A request may be faster than the supervisor's `Joined` of its client, and is kept until then; but not for ever,
    since the client may have died before it joined. Pure: the time is handed in."""

    def __init__(self) -> None:
        self._strangers: dict[ClientId, _EarlyRequest] = {}

    def keep(self, request: Generate | CallWorkers, now: float) -> None:
        self._strangers.setdefault(request.client, _EarlyRequest(now)).asked.append(request)

    def take(self, client: ClientId) -> list[Generate | CallWorkers]:
        """It is known now, or gone: what it has asked, in order. It is no stranger any more."""
        stranger = self._strangers.pop(client, None)
        return [] if stranger is None else stranger.asked

    def abort(self, client: ClientId, request_ids: Sequence[str]) -> None:
        if stranger := self._strangers.get(client):
            stranger.asked = [
                one for one in stranger.asked if isinstance(one, CallWorkers) or one.request_id not in request_ids
            ]

    def expire(self, now: float) -> list[ClientId]:
        """Forget those that were strangers for too long: who they were."""
        late = [client for client, one in self._strangers.items() if now - one.since > PATIENCE_SECONDS]
        for client in late:
            del self._strangers[client]
        return late
