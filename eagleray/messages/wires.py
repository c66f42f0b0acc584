"""Every wire of the system: its sender, its receiver, its messages and its medium.

Each process binds one inbox, and every sender connects to it. The supervisor has a second inbox for the driver of Ray,
and each heartbeat monitor has a socket of its own (`transport/heartbeat.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from eagleray.messages.lifecycle import (
    ChildToParent,
    DriverToLauncher,
    LauncherToDriver,
    MemberToSupervisor,
    SupervisorToClient,
    SupervisorToEngine,
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
    Wire("spawn", "engine, API server", "supervisor", ChildToParent, "the socket pair that a child inherits"),
    Wire("launch", "supervisor", "driver of Ray", LauncherToDriver, "zmq into the driver's inbox"),
    Wire("launched", "driver of Ray", "supervisor", DriverToLauncher, "zmq into a second inbox of the supervisor"),
    Wire("attach", "supervisor", "client", SupervisorToClient, "zmq into the client's inbox"),
    Wire("attach engine", "supervisor", "engine", SupervisorToEngine, "zmq into the engine's inbox"),
    Wire("report", "engine, client", "supervisor", MemberToSupervisor, "zmq into the supervisor's inbox"),
    Wire("requests", "client", "engine", ClientToEngine, "zmq into the engine's inbox"),
    Wire("outputs", "engine", "client", EngineToClient, "zmq into the client's inbox"),
    Wire("waves", "engine", "engine", EngineToEngine, "zmq into the other engine's inbox"),
    Wire(
        "calls",
        "engine",
        "worker",
        Call,
        "by executor: calls, the queue, or a Ray graph and actor calls",
    ),
    Wire("replies", "worker", "engine", Reply, "the same, in the other direction"),
)

# An inbox receives from several wires, so it decodes the union of their messages.
ENGINE_INBOX = SupervisorToEngine | ClientToEngine | EngineToEngine
CLIENT_INBOX = SupervisorToClient | EngineToClient
SUPERVISOR_INBOX = MemberToSupervisor

# An outbox sends on several wires.
ENGINE_OUTBOX = EngineToClient | MemberToSupervisor | EngineToEngine
CLIENT_OUTBOX = ClientToEngine | MemberToSupervisor
SUPERVISOR_OUTBOX = SupervisorToEngine | SupervisorToClient
