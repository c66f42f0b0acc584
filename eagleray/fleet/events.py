"""The events that `FleetState` handles, and the actions that it asks for. Messages of members are events themselves."""

from __future__ import annotations

from typing import NamedTuple

from eagleray.errors import EagleRayError
from eagleray.identity import ClientId, MemberId
from eagleray.messages.control import Command, ControlReturned, StateChanged
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import Attach, Bound, ExpertsFormed, MemberToSupervisor, OpenExperts, Stop
from eagleray.messages.membership import Joined, Left
from eagleray.messages.scaling import Draining

# Events


class StartEngines(NamedTuple):
    """The engines of these ranks are to run from now on."""

    ranks: tuple[int, ...]


class StartApiServers(NamedTuple):
    """The API servers with these indices are to run from now on."""

    indices: tuple[int, ...]


class Adopt(NamedTuple):
    """A client in the supervisor's process has bound its inbox."""

    client: ClientId
    address: str


class Exited(NamedTuple):
    """The process or actor has exited, or could not be spawned."""

    member: MemberId
    cause: Failure


class Silent(NamedTuple):
    """The member sent no heartbeat for its limit."""

    member: MemberId
    seconds: float


class Disconnected(NamedTuple):
    """The connection from the supervisor to the member broke."""

    member: MemberId


class NotConnected(NamedTuple):
    """The address that an external client has registered cannot be connected to."""

    client: ClientId
    reason: str


class TimePassed(NamedTuple):
    """The time of `FleetState.deadline` has come."""


class StopInstance(NamedTuple):
    """Stop every process: API servers first, which let running requests finish for `grace` seconds."""

    grace: float


class KillInstance(NamedTuple):
    """Kill every process at once."""


Event = (
    MemberToSupervisor
    | Bound
    | StartEngines
    | StartApiServers
    | Adopt
    | Exited
    | Silent
    | Disconnected
    | NotConnected
    | TimePassed
    | StopInstance
    | KillInstance
)

# Actions

ToMember = Joined | Left | Stop | Command | ControlReturned | StateChanged | Draining | OpenExperts | ExpertsFormed


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
