"""The members of the fleet, and the messages by which they learn of each other.

A member is known by its identity with the incarnation: a replacement is another member with the same replica key.
`Membership` is pure; `MembershipPublisher` owns the supervisor's outbox and the heartbeats of the members. Both are
driven by the supervisor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from eagleray.fleet import timeouts
from eagleray.identity import ClientId, EngineId, MemberId, replica_key
from eagleray.messages.codec import Codec
from eagleray.messages.control import Command, ControlReturned, InstanceState, StateChanged
from eagleray.messages.lifecycle import Attach, ExpertsFormed, OpenExperts, Stop, SupervisorToClient, SupervisorToEngine
from eagleray.messages.member_history import MemberHistory
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.wires import SUPERVISOR_OUTBOX
from eagleray.transport.heartbeat import HeartbeatMonitor
from eagleray.transport.inbox import Outbox


class Membership:
    """Records which members are expected, attached and joined."""

    def __init__(self) -> None:
        self._expected: set[MemberId] = set()
        """Members that were spawned or attached, and have not left."""
        self._attached: set[MemberId] = set()
        self._joined: dict[MemberId, Joined] = {}
        self._info: EngineInfo | None = None
        """Properties of the engines; None before the first one has joined."""
        self._missing: dict[MemberId, Left] = {}
        """Engines that have left and have no replacement yet, by replica key."""
        self.history = MemberHistory()
        """Published changes, for members that attach later."""

    def expect(self, member: MemberId) -> None:
        """Record that `member` was spawned: its exit is published even if it comes before `attach`."""
        self._expected.add(member)

    def attach(self, member: MemberId) -> tuple[list[Joined], list[Left]]:
        """Record that `member` receives every change from now on.

        Returns the joined members and the missing engines, which it has to know to begin with.
        """
        self._expected.add(member)
        self._attached.add(member)
        missing = [msgspec.structs.replace(left, engine=self._info) for left in self._missing.values()]
        return list(self._joined.values()), missing

    def join(self, joined: Joined) -> list[MemberId]:
        """Record that a member has started. Returns the members to send `joined` to."""
        self._joined[joined.member] = joined
        self._info = joined.engine or self._info
        self.history.record(joined)
        self._missing.pop(replica_key(joined.member), None)
        return [member for member in self._attached if member != joined.member]

    def leave(self, left: Left) -> list[MemberId]:
        """Record that a member has left. Returns the members to send `left` to: none if it was not expected."""
        if left.member not in self._expected:
            return []
        self.history.record(left)
        self._expected.discard(left.member)
        self._attached.discard(left.member)
        self._joined.pop(left.member, None)
        if isinstance(left.member, EngineId):
            self._missing[replica_key(left.member)] = left
        return list(self._attached)


class MembershipPublisher:
    """Sends the changes of the membership to the attached members, and monitors their heartbeats.

    `supervisor` is the address of the supervisor's inbox. `on_silent(member, seconds)` is called, by a thread of the
    monitor, for a member that sent no heartbeat for `heartbeat_timeout` seconds.
    """

    def __init__(
        self,
        *,
        supervisor: str,
        runtime_dir: Path,
        host: str | None,
        heartbeat_timeout: float,
        on_silent: Callable[[MemberId, float], None],
    ) -> None:
        self._supervisor = supervisor
        self._membership = Membership()
        self._state = InstanceState()
        """The state of the instance that was published last."""
        self._addresses: dict[MemberId, str] = {}
        self._heartbeat_numbers: dict[MemberId, int] = {}
        self._members: dict[int, MemberId] = {}
        """Members by the number that the heartbeat monitor knows them by."""
        self._on_silent = on_silent
        with ExitStack() as stack:
            self._outbox: Outbox[MemberId, SupervisorToEngine | SupervisorToClient] = Outbox(
                Codec[SupervisorToEngine | SupervisorToClient](SUPERVISOR_OUTBOX).encode
            )
            stack.callback(self._outbox.close)
            self._heartbeats = HeartbeatMonitor.open(
                runtime_dir=runtime_dir, host=host, limit=heartbeat_timeout, on_silent=self._on_heartbeat_lost
            )
            stack.callback(self._heartbeats.close)
            self._exit_stack = stack.pop_all()

    def __contains__(self, member: MemberId) -> bool:
        """Whether the member is attached and has not left."""
        return member in self._addresses

    @property
    def clients(self) -> list[ClientId]:
        """Attached clients."""
        return [member for member in self._addresses if isinstance(member, ClientId)]

    def expect(self, member: MemberId) -> None:
        """Record that `member` was spawned: its exit is published from now on."""
        self._membership.expect(member)

    def attach(self, member: MemberId, address: str, *, has_heartbeat: bool) -> None:
        """Send `Attach` to a member whose inbox is bound at `address`.

        With `has_heartbeat` the member has to send heartbeats, or counts as silent.
        """
        self._outbox.connect(member, address)
        self._addresses[member] = address
        handle = b""
        if has_heartbeat:
            number, handle = self._heartbeats.invite(within=timeouts.FIRST_HEARTBEAT_TIMEOUT_SECONDS)
            self._heartbeat_numbers[member], self._members[number] = number, member
        joined, missing = self._membership.attach(member)
        history = list(self._membership.history.events)
        self._outbox.send(member, Attach(member, self._supervisor, joined, handle, missing, self._state, history))

    def join(self, member: MemberId, info: EngineInfo | None) -> None:
        """Publish that an attached member has started. `info` is set for engines."""
        joined = Joined(member, self._addresses[member], info, time.time())
        self._publish(self._membership.join(joined), joined)

    def leave(self, left: Left) -> None:
        """Publish that a member has left, and forget it."""
        left = msgspec.structs.replace(left, time=time.time())
        self._publish(self._membership.leave(left), left)
        self._forget(left.member)
        self._outbox.disconnect(left.member, linger_ms=0)

    def evict(self, left: Left) -> None:
        """Publish that a client has left, also to the client itself, which may still run and can register again."""
        left = msgspec.structs.replace(left, time=time.time())
        self._publish([*self._membership.leave(left), left.member], left)
        self._forget(left.member)
        self._outbox.disconnect(left.member)

    def publish_state(self, state: InstanceState) -> None:
        """Send the state of the instance to all clients. Members that are attached from now on receive it too."""
        self._state = state
        for client in self.clients:
            self._outbox.send(client, StateChanged(state))

    def send(self, member: MemberId, message: Command | ControlReturned) -> None:
        """Send `message`, unless the member has left."""
        if member in self._addresses:
            self._outbox.send(member, message)

    def send_stop(self, members: Iterable[MemberId], stop: Stop) -> None:
        for member in members:
            self._outbox.send(member, stop)

    def send_to_engines(self, message: OpenExperts | ExpertsFormed) -> None:
        """Send `message` to all attached engines, whether they have started or not."""
        for member in self._addresses:
            if isinstance(member, EngineId):
                self._outbox.send(member, message)

    def joined_message(self, member: MemberId) -> Joined:
        """Return the address of an attached member as a message to other members."""
        return Joined(member, self._addresses[member])

    def pop_unreachable(self) -> list[MemberId]:
        """Return the attached members whose connection from the supervisor broke since the last call."""
        return self._outbox.pop_broken()

    def close(self) -> None:
        """Close the outbox and the monitor. Queued messages are still sent, for at most a second."""
        self._exit_stack.close()

    def _forget(self, member: MemberId) -> None:
        self._addresses.pop(member, None)
        if (number := self._heartbeat_numbers.pop(member, None)) is not None:
            self._heartbeats.forget(number)
            del self._members[number]

    def _publish(self, members: Iterable[MemberId], message: Joined | Left) -> None:
        for member in members:
            self._outbox.send(member, message)

    def _on_heartbeat_lost(self, number: int, seconds: float) -> None:
        if (member := self._members.get(number)) is not None:
            self._on_silent(member, seconds)
