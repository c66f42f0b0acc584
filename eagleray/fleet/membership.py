"""Who is in the fleet, and who must be told. Pure."""

from __future__ import annotations

from eagleray.identity import PeerId
from eagleray.messages.membership import Joined, Left

__all__ = ["Membership"]


class Membership:
    """Those that can be reached. Owned by the supervisor."""

    def __init__(self) -> None:
        self._attached: set[PeerId] = set()
        self._joined: dict[PeerId, Joined] = {}

    def attach(self, member: PeerId) -> list[Joined]:
        """`member` listens from now on and hears of every change; what it must know to begin with."""
        self._attached.add(member)
        return list(self._joined.values())

    def join(self, joined: Joined) -> list[PeerId]:
        """Who must hear of it."""
        self._joined[joined.member] = joined
        return [peer for peer in self._attached if peer != joined.member]

    def leave(self, left: Left) -> list[PeerId]:
        """Who must hear of it: nobody, if it was not attached or has left before."""
        was_attached = left.member in self._attached
        self._attached.discard(left.member)
        self._joined.pop(left.member, None)
        return list(self._attached) if was_attached else []
