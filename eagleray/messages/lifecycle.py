"""How a process comes to life and ends.

A spawned process binds its inbox and says `Bound` to whoever gave birth to it (over the pipe it was born with; of a Ray
actor it is the result of a call); the supervisor connects and sends `Attach` into that inbox; the process does its
start-up work and answers `Started`. Nobody is told an address before it is bound. A process that cannot go on says
`Failed` the same way. A front-end that was not spawned knocks (`Register`) and is attached then, see docs/wire.md.

Engines that share experts have started when their group is formed: each is told to open for it (`OpenExperts`), says
what others need to reach it (`ExpertsOpened`), and joins when all have (`ExpertsFormed`). When one is lost the rest do
the same again with its successor, for the next epoch.
"""

from __future__ import annotations

import msgspec

from eagleray.config.sections import Config
from eagleray.identity import ClientId, DriverId, EngineId, MemberId, ProcessId
from eagleray.messages.failure import Ended
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.steps import EngineOpened
from eagleray.messages.workers import RayContext


class EngineSpec(msgspec.Struct, frozen=True):
    """What an engine is told at its birth."""

    engine: EngineId
    config: Config
    runtime_dir: str
    """Directory for the sockets of this instance on the engine's host; empty: the engine makes one of its own."""
    host: str | None = None
    """Address to listen on for members of other hosts; None: this host alone."""
    ray: RayContext | None = None
    """Where the program is that asked for the engine, if it runs inside a Ray cluster."""


class ApiServerSpec(msgspec.Struct, frozen=True):
    """What a spawned API server process is told at its birth."""

    client: ClientId
    config: Config
    runtime_dir: str
    listener_fd: int
    """The listening socket, held by the supervisor and inherited."""
    host: str | None = None
    """Address to listen on for engines of other hosts; None: this host alone."""


class Bound(msgspec.Struct, frozen=True, tag=True):
    """`member` has bound its inbox."""

    member: ProcessId
    address: str


ChildToParent = Bound | Ended


class Attach(msgspec.Struct, frozen=True, tag=True):
    """You belong to this fleet: its supervisor, and everybody who is in it now."""

    member: MemberId
    """Who you are."""
    supervisor: str
    """Address of the supervisor's inbox."""
    members: list[Joined]
    heartbeat: bytes = msgspec.field(name="pulse", default=b"")
    """Ticket for `transport.Pulse`: be heard by it from now on, or count as lost. Empty for one that the supervisor
    sees anyway (a client in its own process), and for registered ones, which send `Alive`."""
    missing: list[Left] = []
    """Engines that have left and have no successor yet."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End. API servers finish the requests that run, for at most `grace` seconds."""

    grace: float
    cause: str = ""
    """Why the instance fails; empty if it is stopped on purpose."""


SupervisorToMember = Attach | Joined | Left | Stop


class OpenExperts(msgspec.Struct, frozen=True, tag=True):
    """The engines that share experts form the group of this epoch: leave an earlier one and open for it, unless you
    have. Said again whenever there is news of those that are missing."""

    epoch: int
    missing: list[int]
    """Ranks of the engines that have not opened yet."""


class ExpertsFormed(msgspec.Struct, frozen=True, tag=True):
    """All engines have opened for this epoch: join them."""

    epoch: int
    engines: list[Joined]
    """Who they are and where they listen, in order of rank."""
    members: list[EngineOpened]
    """What their workers have opened, in the same order."""


SupervisorToEngine = SupervisorToMember | OpenExperts | ExpertsFormed


class EngineStarted(msgspec.Struct, frozen=True, tag=True):
    """The engine can take requests."""

    engine: EngineId
    info: EngineInfo


class ClientStarted(msgspec.Struct, frozen=True, tag=True):
    """The client can take requests from its users."""

    client: ClientId


class Knows(msgspec.Struct, frozen=True, tag=True):
    """The client has heard of the engine: requests can go there from now on. Clients of the instance's own say so,
    since it counts as ready only then."""

    client: ClientId
    engine: EngineId


class Unreachable(msgspec.Struct, frozen=True, tag=True):
    """The connection from `sender` to `receiver` has broken: what was on its way may be lost, and nothing arrives any
    more. One of them must go, so that the other is told what is lost."""

    sender: MemberId
    receiver: MemberId


class Register(msgspec.Struct, frozen=True, tag=True):
    """A client that was not spawned wants to belong to the fleet. Answered by `Attach` into its inbox."""

    address: str
    """Of its inbox, which is bound."""
    lease: float
    """Seconds after the last `Alive` for which it counts as there."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A registered client is still there. To be sent a few times in a lease."""

    member: MemberId


class ExpertsOpened(msgspec.Struct, frozen=True, tag=True):
    """An engine has opened for the group of this epoch. It may be one that nobody was told of: then the engine has
    found the group of the epoch before broken."""

    engine: EngineId
    epoch: int
    opened: EngineOpened


MemberToSupervisor = EngineStarted | ClientStarted | Knows | Unreachable | Ended | Register | Alive | ExpertsOpened


class DriverSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of the process that drives Ray for the supervisor, see `fleet/ray_driver.py`."""

    driver: DriverId
    config: Config
    runtime_dir: str
    """Directory in which it binds its inbox."""
    launcher: str
    """Address of the inbox that it reports to."""
    ray: RayContext | None
    """Where the program is that asked for the engines; of a later incarnation, the cluster that the first joined."""
    engine_target: str
    """`module:function` that binds an engine, see `cluster/engine_actor.py`."""
    heartbeat: bytes
    """Handle for `HeartbeatSender`, which the driver starts once it is connected to Ray."""


class DriverReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver is connected to Ray; engines can be asked for."""

    driver: DriverId
    address: str
    """Address of its inbox."""
    host: str
    """Address at which the cluster's other nodes reach this one."""
    cluster: str
    """Address of the cluster, host:port."""
    is_own: bool
    """Whether the driver started the cluster, which then ends with it."""


class SpawnEngine(msgspec.Struct, frozen=True, tag=True):
    """Create the actor of this engine."""

    spec: EngineSpec


class KillEngine(msgspec.Struct, frozen=True, tag=True):
    """Kill this engine's actor at once, and remove whatever belongs to it."""

    engine: EngineId


LauncherToDriver = SpawnEngine | KillEngine

DriverToLauncher = DriverReady | Bound | Ended
"""`Bound` and `Ended` of engines. `Ended` is the last message about an engine: its actor is gone."""
