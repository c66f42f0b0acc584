"""Who is in the fleet, and who must be told. Pure.

Members are known by their identity with its incarnation: a successor is somebody else, who takes the same place.
"""

from __future__ import annotations

import msgspec

from eagleray.identity import EngineId, MemberId
from eagleray.messages.membership import EngineInfo, Joined, Left


def replica_key(member: MemberId) -> MemberId:
    """The same for all incarnations."""
    return msgspec.structs.replace(member, incarnation=0)


class Membership:
    """Who is expected, who listens, who can be reached. Owned by the supervisor."""

    def __init__(self) -> None:
        self._expected: set[MemberId] = set()
        """They were started, or listen, and have not left."""
        self._attached: set[MemberId] = set()
        self._joined: dict[MemberId, Joined] = {}
        self._info: EngineInfo | None = None
        """Of the engines; None before the first has joined."""
        self._absent: dict[MemberId, Left] = {}
        """By place: engines that have left and have no successor yet."""

    def expect(self, member: MemberId) -> None:
        """`member` was started: its end is news, even if it comes before it listens."""
        self._expected.add(member)

    def attach(self, member: MemberId) -> tuple[list[Joined], list[Left]]:
        """`member` listens from now on and hears of every change; what it must know to begin with: who is there, and
        which engines are missing."""
        self._expected.add(member)
        self._attached.add(member)
        missing = [msgspec.structs.replace(left, engine=self._info) for left in self._absent.values()]
        return list(self._joined.values()), missing

    def join(self, joined: Joined) -> list[MemberId]:
        """Who must hear of it."""
        self._joined[joined.member] = joined
        self._info = joined.engine or self._info
        self._absent.pop(replica_key(joined.member), None)
        return [peer for peer in self._attached if peer != joined.member]

    def leave(self, left: Left) -> list[MemberId]:
        """Who must hear of it: nobody, if it has left before or was never known."""
        if left.member not in self._expected:
            return []
        self._expected.discard(left.member)
        self._attached.discard(left.member)
        self._joined.pop(left.member, None)
        if isinstance(left.member, EngineId):
            self._absent[replica_key(left.member)] = left
        return list(self._attached)
