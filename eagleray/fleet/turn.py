"""A turn of the fleet's state machine: the actions that an event leads to, its time, and the timers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from eagleray.errors import EagleRayError
from eagleray.fleet.timers import Timers
from eagleray.identity import ClientId, MemberId
from eagleray.messages.checkpoints import FetchCheckpoint
from eagleray.messages.control import Command, ControlReturned, StateChanged
from eagleray.messages.lifecycle import Attach, ExpertsFormed, OpenExperts, Stop
from eagleray.messages.membership import Joined, Left
from eagleray.messages.scaling import Draining

# Actions

ToMember = (
    Joined
    | Left
    | Stop
    | Command
    | ControlReturned
    | StateChanged
    | Draining
    | FetchCheckpoint
    | OpenExperts
    | ExpertsFormed
)


class Spawn(NamedTuple):
    """Spawn the process or actor. `Exited` follows in any case, `Bound` before it if all goes well."""

    member: MemberId


class Terminate(NamedTuple):
    """Ask the process to exit, if there is one."""

    member: MemberId


class Kill(NamedTuple):
    """Kill the process, if there is one."""

    member: MemberId


class Connect(NamedTuple):
    """Connect to the member, expect its heartbeats if `has_heartbeat`, and send `attach`, whose supervisor's address
    and heartbeat are still to be filled in."""

    member: MemberId
    address: str
    attach: Attach
    has_heartbeat: bool


class Disconnect(NamedTuple):
    """Forget the member. Messages that are queued for it are still sent if `flushes`."""

    member: MemberId
    flushes: bool


class Send(NamedTuple):
    receivers: tuple[MemberId, ...]
    message: ToMember


class Serve(NamedTuple):
    """Every first member has started or was given up, and the clients know the engines."""


class FailInstance(NamedTuple):
    """The instance cannot go on."""

    error: EagleRayError


class Stopped(NamedTuple):
    """Every process has exited, or was killed and still runs."""


Action = Spawn | Terminate | Kill | Connect | Disconnect | Send | Serve | FailInstance | Stopped


# Timers


@dataclass(frozen=True)
class LeaseTimer:
    client: ClientId


@dataclass(frozen=True)
class BrokenConnectionTimer:
    ends: tuple[MemberId, ...]
    """(sender, receiver), or (receiver,) for a connection of the supervisor"""


@dataclass(frozen=True)
class ControlTimer:
    """The next deadline of the control calls."""


@dataclass(frozen=True)
class StopTimer:
    """The end of the time that external clients have to leave."""


@dataclass(frozen=True)
class ScalingTimer:
    """The next deadline of scaling, or of its callers."""


TimerKey = MemberId | LeaseTimer | BrokenConnectionTimer | ControlTimer | StopTimer | ScalingTimer
"""The timer of a replica has its replica key."""


class Turn:
    """Shared by the parts of `FleetState`, which begins a new turn with each event."""

    def __init__(self) -> None:
        self.now = 0.0
        """Time of the event, in seconds of a monotonic clock."""
        self.unix_time = 0.0
        """The same as Unix time."""
        self.timers: Timers[TimerKey] = Timers()
        self._actions: list[Action] = []

    def begin(self, now: float, unix_time: float) -> None:
        self.now, self.unix_time = now, unix_time

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def send(self, message: ToMember, *receivers: MemberId) -> None:
        if receivers:
            self._actions.append(Send(receivers, message))

    def end(self) -> list[Action]:
        """Return the actions in their order."""
        actions, self._actions = self._actions, []
        return actions
