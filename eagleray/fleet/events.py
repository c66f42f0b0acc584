"""The events that `FleetState` handles. Messages of members are events themselves."""

from __future__ import annotations

from typing import NamedTuple

from eagleray.identity import ClientId, MemberId
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import Bound, MemberToSupervisor, NodeDraining


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
    | NodeDraining
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
