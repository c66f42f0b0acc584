"""How a process comes to life and ends.

A spawned process binds its inbox and says `Bound` over the pipe it was born with; the supervisor connects and sends
`Attach` into that inbox; the process does its start-up work and answers `Started`. Nobody is told an address before
it is bound. A process that cannot go on says `Failed` over the pipe.
"""

from __future__ import annotations

import msgspec

from eagleray.config import Config
from eagleray.identity import ClientId, EngineId
from eagleray.messages.failure import Failure
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.workers import RayContext

__all__ = [
    "ApiServerSpec",
    "Attach",
    "Bound",
    "ChildToParent",
    "ClientStarted",
    "EngineSpec",
    "EngineStarted",
    "Failed",
    "MemberToSupervisor",
    "Stop",
    "SupervisorToMember",
]


class EngineSpec(msgspec.Struct, frozen=True):
    """What a spawned engine process is told at its birth."""

    engine: EngineId
    config: Config
    runtime_dir: str
    """Directory for the sockets of this instance."""
    ray: RayContext | None = None
    """Where the program is that asked for the engine, if it runs inside a Ray cluster."""


class ApiServerSpec(msgspec.Struct, frozen=True):
    """What a spawned API server process is told at its birth."""

    client: ClientId
    config: Config
    runtime_dir: str
    listener_fd: int
    """The listening socket, held by the supervisor and inherited."""


class Bound(msgspec.Struct, frozen=True, tag=True):
    """My inbox is bound; reach me here."""

    address: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """I end because of this."""

    cause: Failure


ChildToParent = Bound | Failed


class Attach(msgspec.Struct, frozen=True, tag=True):
    """You belong to this fleet: its supervisor, and everybody who is in it now."""

    supervisor: str
    """Address of the supervisor's inbox."""
    members: list[Joined]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End. API servers finish the requests that run, for at most `grace` seconds."""

    grace: float


SupervisorToMember = Attach | Joined | Left | Stop


class EngineStarted(msgspec.Struct, frozen=True, tag=True):
    """The engine can take requests."""

    engine: EngineId
    info: EngineInfo


class ClientStarted(msgspec.Struct, frozen=True, tag=True):
    """The client can take requests from its users."""

    client: ClientId


MemberToSupervisor = EngineStarted | ClientStarted
