"""Messages by which processes start, join the fleet and stop.

A spawned process binds its inbox and reports `Bound` to its parent: over the socket pair that it inherits, or, if it is
a Ray actor, as the result of a call. The supervisor connects and sends `Attach` into that inbox; the process starts up
and replies with `EngineStarted` or `ClientStarted`. No address is published before it is bound. A process that fails
sends `Ended` to its parent. A client that was not spawned sends `Register` and is attached then, see docs/wire.md.

Engines that share experts have started when their expert group is formed. Each reports that it has loaded
(`EngineLoaded`), is told to open for the group (`OpenExperts`), replies with the addresses that the others need
(`ExpertsOpened`), joins when all have opened (`ExpertsFormed`), and reports that it has its experts (`ExpertsJoined`).
When one exits, or engines are added or removed, all repeat this for the next epoch.
"""

from __future__ import annotations

import msgspec

from eagleray.config.sections import Config
from eagleray.identity import ClientId, DriverId, EngineId, MemberId, ProcessId
from eagleray.messages.checkpoints import CheckpointFetched, FetchCheckpoint
from eagleray.messages.control import Command, CommandDone, ControlCall, ControlReturned, InstanceState, StateChanged
from eagleray.messages.failure import Ended
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.scaling import Drained, Draining, LoadReport
from eagleray.messages.workers import EngineOpened, RayContext


class EngineSpec(msgspec.Struct, frozen=True):
    """Payload of a process or actor that becomes an engine."""

    engine: EngineId
    config: Config
    runtime_dir: str
    """Directory for the instance's sockets on the engine's host; empty if the engine is to create its own."""
    host: str | None = None
    """Address at which members on other hosts reach the engine; None if all members are on this host."""
    ray: RayContext | None = None
    """Ray context of the program that asked for the engine; None if it is outside of Ray."""
    num_engines: int | None = None
    """Number of engines that the instance is to have with this one; None: the configured number."""
    expert_group_size: int | None = None
    """Number of engines of the running expert group that the engine joins and that gives it its experts; None: it reads
    the experts that belong to its rank at the start."""
    update: int = 0
    """Number of the weight update that the weights of the checkpoint count as."""


class ApiServerSpec(msgspec.Struct, frozen=True):
    """Payload of a process that becomes an API server."""

    client: ClientId
    config: Config
    runtime_dir: str
    listener_fd: int
    """Descriptor of the listening socket, which the supervisor holds and the process inherits."""
    host: str | None = None
    """Address at which engines on other hosts reach the server; None if all engines are on this host."""


class Bound(msgspec.Struct, frozen=True, tag=True):
    """`member` has bound its inbox."""

    member: ProcessId
    address: str


ChildToParent = Bound | Ended


class Attach(msgspec.Struct, frozen=True, tag=True):
    """First message to a member: its identity, the supervisor's address and the present members. An engine is told of
    clients alone, and gets neither `missing` nor `history`."""

    member: MemberId
    """Identity of the receiver."""
    supervisor: str
    """Address of the supervisor's inbox."""
    members: list[Joined]
    heartbeat: bytes = msgspec.field(name="pulse", default=b"")
    """Handle for `HeartbeatSender`, which the member starts. Its silence counts as an exit from then on.

    Empty for a client in the supervisor's own process, and for registered clients, which send `Alive` instead.
    """
    missing: list[Left] = []
    """Engines that have left and have no replacement yet."""
    state: InstanceState = InstanceState()
    """State of the instance, which the member adopts before it starts."""
    history: list[Joined | Left] = []
    """Earlier changes of the membership, see `MemberHistory`."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Request to exit. API servers first finish running requests, for at most `grace` seconds."""

    grace: float
    cause: str = ""
    """Cause of the instance's failure; empty if it is stopped on purpose."""
    others_stay: bool = False
    """Whether other API servers accept from the same socket, so that this one refuses no request: it accepts no more
    connections, and closes each that it has after its next answer."""


SupervisorToMember = Attach | Joined | Left | Stop | Command
"""Messages for every member, although `Command` is sent to the instance's own clients and to engines only."""

SupervisorToClient = SupervisorToMember | ControlReturned | StateChanged | Draining | FetchCheckpoint


class OpenExperts(msgspec.Struct, frozen=True, tag=True):
    """Request to form the expert group of this epoch: the engine leaves an earlier group and opens for this one, unless
    it has. Sent again whenever `missing` changes."""

    epoch: int
    ranks: list[int]
    """Ranks of all engines of the group."""
    missing: list[int]
    """Ranks of the engines that have not opened yet."""


class ExpertsFormed(msgspec.Struct, frozen=True, tag=True):
    """All engines have opened for this epoch; the receiver joins them."""

    epoch: int
    engines: list[Joined]
    """Identities and addresses of the engines, in order of rank."""
    members: list[EngineOpened]
    """Addresses that the engines' workers have opened, in the same order."""
    leaving: list[int] = []
    """Ranks of engines that are about to leave: the others take over their experts in this epoch."""


SupervisorToEngine = SupervisorToMember | OpenExperts | ExpertsFormed


class EngineStarted(msgspec.Struct, frozen=True, tag=True):
    """The engine can take requests."""

    engine: EngineId
    info: EngineInfo
    update: int = 0
    """Number of the weight update whose weights the engine has; 0 for those of the checkpoint."""


class ClientStarted(msgspec.Struct, frozen=True, tag=True):
    """The client can take requests from its users."""

    client: ClientId


class Knows(msgspec.Struct, frozen=True, tag=True):
    """The client has received the engine's `Joined` and can send it requests.

    The instance's own clients must send it, because the instance is ready only then.
    """

    client: ClientId
    engine: EngineId


class Unreachable(msgspec.Struct, frozen=True, tag=True):
    """The connection from `sender` to `receiver` broke: messages in transit may be lost, and no further one arrives.

    One of the two has to leave, so that the other receives its `Left`.
    """

    sender: MemberId
    receiver: MemberId


class Register(msgspec.Struct, frozen=True, tag=True):
    """Request of a client that was not spawned to join the fleet; the reply is `Attach` into its inbox."""

    address: str
    """Address of its inbox, which is bound."""
    lease: float
    """Seconds after the last `Alive` for which the client counts as present."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A registered client is still present. Sent a few times in each lease."""

    member: MemberId


class EngineLoaded(msgspec.Struct, frozen=True, tag=True):
    """An engine has loaded its model and can join an expert group."""

    engine: EngineId


class ExpertsOpened(msgspec.Struct, frozen=True, tag=True):
    """An engine has opened for the expert group of this epoch."""

    engine: EngineId
    epoch: int
    opened: EngineOpened


class ExpertsJoined(msgspec.Struct, frozen=True, tag=True):
    """An engine has joined the expert group of this epoch, and has its experts."""

    engine: EngineId
    epoch: int
    shortage: str | None = None
    """Why it cannot take over the experts of engines that are about to leave, which then keep them; None if it can."""


class ExpertsBroken(msgspec.Struct, frozen=True, tag=True):
    """An engine found the expert group of this epoch broken: another engine is gone, or a connection to it."""

    engine: EngineId
    epoch: int


MemberToSupervisor = (
    EngineStarted
    | EngineLoaded
    | ClientStarted
    | Knows
    | Unreachable
    | Ended
    | Register
    | Alive
    | ExpertsOpened
    | ExpertsJoined
    | ExpertsBroken
    | ControlCall
    | CommandDone
    | Drained
    | CheckpointFetched
    | LoadReport
)


class DriverSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of the process that drives Ray for the supervisor, see `fleet/ray_driver.py`."""

    driver: DriverId
    config: Config
    runtime_dir: str
    """Directory in which the driver binds its inbox."""
    launcher: str
    """Address of the launcher's inbox."""
    ray: RayContext | None
    """Ray context of the program that asked for the engines; for a later incarnation, the cluster of the first."""
    engine_target: str
    """`module:function` that binds an engine, see `cluster/engine_actor.py`."""
    heartbeat: bytes
    """Handle for `HeartbeatSender`, which the driver starts once it is connected to Ray."""


class DriverReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver is connected to Ray and can create engines."""

    driver: DriverId
    address: str
    """Address of the driver's inbox."""
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


class NodeDraining(msgspec.Struct, frozen=True, tag=True):
    """A node of the engine is about to go, and other nodes have room for the engine. Repeated until it has left."""

    engine: EngineId
    node: str
    """Name of the node in messages."""
    seconds_left: float | None
    """Seconds until the node goes; None if that is not known."""


LauncherToDriver = SpawnEngine | KillEngine

DriverToLauncher = DriverReady | Bound | Ended | NodeDraining
"""`Bound` and `Ended` are about engines. `Ended` is the last message about one: its actor is gone."""
