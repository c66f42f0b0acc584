"""The latest changes of the membership. The supervisor keeps them for members that attach later, and each client for
its live page. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from eagleray.identity import MemberId, replica_key
from eagleray.messages.membership import Joined, Left

MAX_EVENTS = 200


class MemberHistory:
    """The last `MAX_EVENTS` changes, and the last one of each replica that is present, comes back or was removed."""

    def __init__(self, events: Iterable[Joined | Left] = ()) -> None:
        self.events = [*events]
        """Changes from the oldest to the newest, without addresses and properties of engines."""

    def record(self, event: Joined | Left) -> None:
        if isinstance(event, Joined):
            event = Joined(event.member, "", time=event.time)
        self.events.append(event)
        if len(self.events) > MAX_EVENTS:
            lasts = self.latest().values()
            needed = {id(last) for last in lasts if isinstance(last, Joined) or last.returns or last.is_planned}
            oldest = next((index for index, old in enumerate(self.events) if id(old) not in needed), None)
            if oldest is not None:
                del self.events[oldest]

    def latest(self) -> dict[MemberId, Joined | Left]:
        """Return the last change of each replica, by replica key."""
        return {replica_key(event.member): event for event in self.events}
