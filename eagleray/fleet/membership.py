"""The members of the fleet, and the messages by which they learn of each other. Pure.

A member is known by its identity with the incarnation: a replacement is another member with the same replica key.
Clients are told of all members. Engines are told of clients alone: those of an expert group learn of each other when
they form it, and else the messages would grow with the square of the number of engines. Owned by `FleetState`.
"""

from __future__ import annotations

import msgspec

from eagleray.fleet.turn import Connect, Disconnect, Turn
from eagleray.identity import ClientId, EngineId, MemberId, replica_key
from eagleray.messages.control import InstanceState, StateChanged
from eagleray.messages.lifecycle import Attach
from eagleray.messages.member_history import MemberHistory
from eagleray.messages.membership import EngineInfo, Joined, Left


class Membership:
    """Records which members are expected, attached and joined, and tells the attached ones."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._expected: set[MemberId] = set()
        """Members that were spawned or attached, and have not left."""
        self._addresses: dict[MemberId, str] = {}
        """Addresses of attached members."""
        self._joined: dict[MemberId, Joined] = {}
        self._info: EngineInfo | None = None
        """Properties of the engines; None before the first one has joined."""
        self._missing: dict[MemberId, Left] = {}
        """Engines that have left and have no replacement yet, by replica key."""
        self._state = InstanceState()
        """The state of the instance that was published last."""
        self.history = MemberHistory()
        """Published changes, for members that attach later."""

    def __contains__(self, member: MemberId) -> bool:
        """Whether the member is attached and has not left."""
        return member in self._addresses

    @property
    def clients(self) -> list[ClientId]:
        """Attached clients."""
        return [member for member in self._addresses if isinstance(member, ClientId)]

    @property
    def engines(self) -> list[EngineId]:
        """Attached engines, whether they have joined or not."""
        return [member for member in self._addresses if isinstance(member, EngineId)]

    def has_joined(self, member: MemberId) -> bool:
        """Whether the member was published and has not left."""
        return member in self._joined

    @property
    def engine_infos(self) -> list[EngineInfo]:
        """Properties of the engines that have joined."""
        return [joined.engine for joined in self._joined.values() if joined.engine is not None]

    def expect(self, member: MemberId) -> None:
        """Record that `member` was spawned: its exit is published even if it comes before `attach`."""
        self._expected.add(member)

    def attach(self, member: MemberId, address: str, *, has_heartbeat: bool) -> None:
        """Have `Attach` sent to a member whose inbox is bound at `address`. It is told of changes from now on.

        With `has_heartbeat` the member has to send heartbeats, or counts as silent.
        """
        self._expected.add(member)
        self._addresses[member] = address
        is_client = isinstance(member, ClientId)
        missing = [msgspec.structs.replace(left, engine=self._info) for left in self._missing.values()]
        attach = Attach(
            member,
            supervisor="",
            members=[joined for joined in self._joined.values() if is_client or isinstance(joined.member, ClientId)],
            missing=missing if is_client else [],
            state=self._state,
            history=list(self.history.events) if is_client else [],
        )
        self._turn.act(Connect(member, address, attach, has_heartbeat))

    def join(self, member: MemberId, info: EngineInfo | None) -> None:
        """Publish that an attached member has started. `info` is set for engines."""
        joined = Joined(member, self._addresses[member], info, self._turn.unix_time)
        self._joined[member] = joined
        self._info = info or self._info
        self.history.record(joined)
        self._missing.pop(replica_key(member), None)
        self._publish(joined)

    def leave(self, left: Left, *, flushes: bool = False) -> None:
        """Publish that a member has left, unless it was not expected, and forget it. With `flushes`, messages that are
        queued for it are still sent."""
        self._remove(left)
        self._turn.act(Disconnect(left.member, flushes))

    def withdraw(self, member: MemberId) -> None:
        """Forget a member of which no other member knows."""
        self.forget(member)
        self._turn.act(Disconnect(member, flushes=True))

    def retire(self, left: Left) -> None:
        """Publish that an engine which has left before does not come back."""
        self._expected.add(left.member)
        self._remove(left)

    def evict(self, left: Left) -> None:
        """Publish that a client has left, also to the client itself, which may still run and can register again."""
        left = self._remove(left)
        self._turn.send(left, left.member)
        self._turn.act(Disconnect(left.member, flushes=True))

    def forget(self, member: MemberId) -> None:
        """Forget a member that cannot be connected to, and of which no other member knows."""
        self._expected.discard(member)
        self._addresses.pop(member, None)

    def publish_state(self, state: InstanceState) -> None:
        """Send the state of the instance to all clients. Members that are attached from now on receive it too."""
        self._state = state
        self._turn.send(StateChanged(state), *self.clients)

    def joined_message(self, member: MemberId) -> Joined:
        """Return the address of an attached member as a message to other members."""
        return Joined(member, self._addresses[member])

    def _remove(self, left: Left) -> Left:
        left = msgspec.structs.replace(left, time=self._turn.unix_time)
        self._addresses.pop(left.member, None)
        if left.member in self._expected:
            self._expected.discard(left.member)
            self._joined.pop(left.member, None)
            self.history.record(left)
            if isinstance(left.member, EngineId):
                self._missing[replica_key(left.member)] = left
            self._publish(left)
        return left

    def _publish(self, change: Joined | Left) -> None:
        receivers = self.clients if isinstance(change.member, EngineId) else self._addresses
        self._turn.send(change, *(receiver for receiver in receivers if receiver != change.member))
