"""What members know of each other: the board keeps the membership, and tells everybody what changes.

Owns the supervisor's outbox and the pulses of the members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from eagleray.fleet.membership import Membership
from eagleray.identity import ClientId, EngineId, MemberId
from eagleray.messages.codec import Codec
from eagleray.messages.lifecycle import Attach, ExpertsFormed, OpenExperts, Stop, SupervisorToEngine
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.wires import SUPERVISOR_OUTBOX
from eagleray.transport.heartbeat import HeartbeatMonitor
from eagleray.transport.inbox import Outbox

FIRST_BEAT_SECONDS = 120.0
"""After it was attached a member is heard: before that it may load libraries, from a slow disk."""


class MembershipPublisher:
    """`supervisor`: the address that members are told; `heartbeat_timeout`: seconds. `on_silent(member, seconds)` is
    called by a thread of the board's own."""

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
        self._addresses: dict[MemberId, str] = {}
        self._pulses: dict[MemberId, int] = {}
        self._members: dict[int, MemberId] = {}
        """By the number of the pulse."""
        self._on_silent = on_silent
        with ExitStack() as stack:
            self._outbox: Outbox[MemberId, SupervisorToEngine] = Outbox(
                Codec[SupervisorToEngine](SUPERVISOR_OUTBOX).encode
            )
            stack.callback(self._outbox.close)
            self._pulse = HeartbeatMonitor.open(
                runtime_dir=runtime_dir, host=host, limit=heartbeat_timeout, on_silent=self._silent
            )
            stack.callback(self._pulse.close)
            self._ends = stack.pop_all()

    def __contains__(self, member: MemberId) -> bool:
        """It listens, and has not left."""
        return member in self._addresses

    def expect(self, member: MemberId) -> None:
        """It was started: its end is news from now on."""
        self._membership.expect(member)

    def attach(self, member: MemberId, address: str, *, has_pulse: bool) -> None:
        """`member` listens at `address`: tell it who it is, and who is there. `has_pulse`: it shall be heard, or count
        as silent."""
        self._outbox.connect(member, address)
        self._addresses[member] = address
        ticket = b""
        if has_pulse:
            peer, ticket = self._pulse.invite(within=FIRST_BEAT_SECONDS)
            self._pulses[member], self._members[peer] = peer, member
        present, missing = self._membership.attach(member)
        self._outbox.send(member, Attach(member, self._supervisor, present, ticket, missing))

    def join(self, member: MemberId, info: EngineInfo | None) -> None:
        """It works. `info`: of an engine."""
        joined = Joined(member, self._addresses[member], info)
        self._tell(self._membership.join(joined), joined)

    def leave(self, left: Left) -> None:
        """It does not work any more."""
        self._tell(self._membership.leave(left), left)
        self._forget(left.member)
        self._outbox.disconnect(left.member, linger_ms=0)

    def expel(self, left: Left) -> None:
        """The same for a client that may be there all the same: it hears of it, and can come again."""
        self._tell([*self._membership.leave(left), left.member], left)
        self._forget(left.member)
        self._outbox.disconnect(left.member)

    def send_stop(self, members: Iterable[MemberId], stop: Stop) -> None:
        for member in members:
            self._outbox.send(member, stop)

    def send_to_engines(self, message: OpenExperts | ExpertsFormed) -> None:
        """All that listen, whether they have started or not."""
        for member in self._addresses:
            if isinstance(member, EngineId):
                self._outbox.send(member, message)

    def whereabouts(self, member: MemberId) -> Joined:
        """Where it listens."""
        return Joined(member, self._addresses[member])

    def take_unreachable(self) -> list[MemberId]:
        """Members that listen, and to whom the connection has broken since the last call."""
        return self._outbox.pop_broken()

    @property
    def clients(self) -> list[ClientId]:
        """Those that listen."""
        return [member for member in self._addresses if isinstance(member, ClientId)]

    def close(self) -> None:
        """What was said last still goes out, for at most a second."""
        self._ends.close()

    def _forget(self, member: MemberId) -> None:
        self._addresses.pop(member, None)
        if (peer := self._pulses.pop(member, None)) is not None:
            self._pulse.forget(peer)
            del self._members[peer]

    def _tell(self, members: Iterable[MemberId], message: Joined | Left) -> None:
        for member in members:
            self._outbox.send(member, message)

    def _silent(self, peer: int, seconds: float) -> None:
        if (member := self._members.get(peer)) is not None:
            self._on_silent(member, seconds)
