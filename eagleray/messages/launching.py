"""How a supervisor has engines made that are Ray actors.

The supervisor is no driver of Ray: Ray ends the process of a driver that has lost the cluster's control store. A child
of it is, and makes and watches the actors, see `fleet/ray_driver.py`.
"""

from __future__ import annotations

import msgspec

from eagleray.config.sections import Config
from eagleray.identity import EngineId
from eagleray.messages.lifecycle import ChildToParent, EngineSpec
from eagleray.messages.workers import RayContext


class DriverSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that drives Ray is told at its birth."""

    number: int
    """How many there were before it in this instance."""
    instance: str
    config: Config
    runtime_dir: str
    """Where it binds its inbox."""
    launcher: str
    """Address of the inbox that it reports to."""
    ray: RayContext | None
    """Where the program is that asked for the engines; or, of a successor, the cluster that its predecessor was in."""
    engine_target: str
    """`module:function` that binds an engine, see `cluster/engine_actor.py`."""
    pulse: bytes
    """Ticket for `transport.Pulse`: to be heard by it once it is connected, or count as hung."""


class DriverReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """I am connected to Ray; engines can be asked for."""

    number: int
    address: str
    """Of my inbox."""
    host: str
    """Address at which the cluster's other nodes reach this one."""
    cluster: str
    """Address of the cluster, host:port."""
    is_own: bool
    """The cluster was started by me and ends with me."""


class SpawnEngine(msgspec.Struct, frozen=True, tag=True):
    """Make the actor of this engine."""

    spec: EngineSpec


class EndEngine(msgspec.Struct, frozen=True, tag=True):
    """End this engine's actor, and whatever belongs to it, at once."""

    engine: EngineId


LauncherToDriver = SpawnEngine | EndEngine


class EngineReported(msgspec.Struct, frozen=True, tag=True):
    """What a spawned process would say to its parent."""

    engine: EngineId
    message: ChildToParent


class EngineEnded(msgspec.Struct, frozen=True, tag=True):
    """The engine is gone, and why. The last of it."""

    engine: EngineId
    reason: str


DriverToLauncher = DriverReady | EngineReported | EngineEnded
