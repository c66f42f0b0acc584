"""Every wire of the system: who speaks, who listens, in which messages, over what.

Each process has one inbox, bound by itself; whoever wants to speak to it connects.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from eagleray.messages.lifecycle import (
    ChildToParent,
    DriverToLauncher,
    LauncherToDriver,
    MemberToSupervisor,
    SupervisorToEngine,
    SupervisorToMember,
)
from eagleray.messages.outputs import EngineToClient
from eagleray.messages.requests import ClientToEngine
from eagleray.messages.steps import Call, Reply
from eagleray.messages.waves import EngineToEngine


class Wire(NamedTuple):
    name: str
    sender: str
    receiver: str
    messages: Any
    medium: str


WIRES = (
    Wire("spawn", "engine, API server", "supervisor", ChildToParent, "the socket pair a child is born with"),
    Wire("launch", "supervisor", "driver of Ray", LauncherToDriver, "zmq into the driver's inbox"),
    Wire("launched", "driver of Ray", "supervisor", DriverToLauncher, "zmq into an inbox of the supervisor's own"),
    Wire("attach", "supervisor", "client", SupervisorToMember, "zmq into the client's inbox"),
    Wire("attach engine", "supervisor", "engine", SupervisorToEngine, "zmq into the engine's inbox"),
    Wire("report", "engine, client", "supervisor", MemberToSupervisor, "zmq into the supervisor's inbox"),
    Wire("requests", "client", "engine", ClientToEngine, "zmq into the engine's inbox"),
    Wire("outputs", "engine", "client", EngineToClient, "zmq into the client's inbox"),
    Wire("waves", "engine", "engine", EngineToEngine, "zmq into the other engine's inbox"),
    Wire("calls", "engine", "worker", Call, "by executor: a call; the queue; a Ray compiled graph and actor calls"),
    Wire("replies", "worker", "engine", Reply, "the way back of the same"),
)

# One inbox takes several wires: what may arrive in it is the union of theirs.
ENGINE_INBOX = SupervisorToEngine | ClientToEngine | EngineToEngine
CLIENT_INBOX = SupervisorToMember | EngineToClient
SUPERVISOR_INBOX = MemberToSupervisor

# And one outbox sends into several inboxes.
ENGINE_OUTBOX = EngineToClient | MemberToSupervisor | EngineToEngine
CLIENT_OUTBOX = ClientToEngine | MemberToSupervisor
SUPERVISOR_OUTBOX = SupervisorToEngine
