"""The process that drives Ray: makes the engines that are Ray actors, and watches and ends them. A child of the
supervisor's process, which `ray_engines` has it do that.

What it makes is not detached: however this process ends, Ray ends the actors and removes the placement groups.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from eagleray.cluster import placement_groups
from eagleray.cluster.connect import Connection, connect
from eagleray.cluster.nodes import address_of, list_nodes, select_nodes
from eagleray.cluster.placement import DedicatedGroups, EnginePlacer, UserGroup
from eagleray.errors import DeadlineExceeded
from eagleray.fleet.ray_life import RayEngineLifecycle
from eagleray.identity import EngineId
from eagleray.messages.codec import Codec
from eagleray.messages.lifecycle import (
    DriverReady,
    DriverSpec,
    DriverToLauncher,
    EngineSpec,
    KillEngine,
    LauncherToDriver,
    SpawnEngine,
)
from eagleray.process.parent import Parent
from eagleray.transport.heartbeat import HeartbeatSender
from eagleray.transport.inbox import Inbox, Outbox

LOOK_SECONDS = 1.0
"""A signal wakes the main thread at once, unless another thread has got it."""

TOGETHER_SECONDS = 0.02
"""After one message, for what was sent with it: engines that are born together are placed together."""

END_SECONDS = 12.0


def run(payload: bytes, parent: Parent) -> None:
    """Be the driver that `payload`, an encoded `DriverSpec`, describes, until SIGTERM."""
    spec = msgspec.msgpack.decode(payload, type=DriverSpec)
    options = spec.config.ray
    with ExitStack() as ends:
        with parent.reporting_failure():
            connection = connect(
                options.ray_address or (None if spec.ray is None else spec.ray.address),
                namespace=spec.driver.instance,
                program=spec.ray,
                keep=options.ray_env_include,
                on_lost=parent.report_failure,
            )
            ends.callback(connection.close)
            places = _places(spec, connection)
            select_nodes(list_nodes(), options.ray_nodes)  # a name of no node is an error now
        inbox: Inbox[LauncherToDriver] = Inbox(
            Path(spec.runtime_dir), f"ray-driver-{spec.driver.incarnation}", Codec(LauncherToDriver).decode
        )
        ends.callback(inbox.close)
        ends.callback(HeartbeatSender.start(spec.heartbeat, on_silent=_keep_on).close)
        _report(spec, connection, inbox.address)
        driver = Driver(spec, places=places, cluster=connection.address)
        ends.callback(driver.close)
        while True:
            driver.handle(_gather(inbox))


def _keep_on(seconds: float) -> None:
    """A supervisor that was stopped for a while is no reason to end: when it has died, `Parent` knows."""


class Driver:
    """Owns the lives of the engines."""

    def __init__(self, spec: DriverSpec, *, places: EnginePlacer, cluster: str) -> None:
        self._spec = spec
        self._places = places
        self._cluster = cluster
        self._lives: dict[EngineId, RayEngineLifecycle] = {}

    def handle(self, messages: Sequence[LauncherToDriver]) -> None:
        born = {}
        for message in messages:
            match message:
                case SpawnEngine(spec):
                    born[spec.engine] = self._make(spec)
                case KillEngine(engine):
                    if life := born.get(engine) or self._lives.get(engine):
                        life.end()
        for life in born.values():
            life.start()
        self._lives = {engine: life for engine, life in self._lives.items() if not life.is_over} | born

    def close(self) -> None:
        """End every engine that is left."""
        deadline = time.monotonic() + END_SECONDS
        for life in self._lives.values():
            life.end()
        late = [engine.label for engine, life in self._lives.items() if not life.wait_until_over(deadline)]
        if late:
            raise DeadlineExceeded(f"Ray has not ended {', '.join(late)} within {END_SECONDS:.0f} s")

    def _make(self, spec: EngineSpec) -> RayEngineLifecycle:
        return RayEngineLifecycle(
            spec,
            places=self._places,
            cluster=self._cluster,
            launcher=self._spec.launcher,
            target=self._spec.engine_target,
        )


def _gather(inbox: Inbox[LauncherToDriver]) -> list[LauncherToDriver]:
    """What arrives together."""
    messages = []
    message = inbox.receive(LOOK_SECONDS)
    while message is not None:
        messages.append(message)
        message = inbox.receive(TOGETHER_SECONDS)
    return messages


def _places(spec: DriverSpec, connection: Connection) -> EnginePlacer:
    """In the placement group that is given, or that the asking program is in; else in groups of the engines' own."""
    is_same_cluster = spec.ray is not None and spec.ray.address == connection.address
    current = spec.ray.placement_group if spec.ray is not None and is_same_cluster else None
    given = spec.config.ray.placement_group or current
    if given is None:
        return DedicatedGroups(spec.config, preferred_node=connection.node_id)
    return UserGroup(spec.config, placement_groups.find(given), preferred_node=connection.node_id)


def _report(spec: DriverSpec, connection: Connection, address: str) -> None:
    outbox: Outbox[str, DriverToLauncher] = Outbox(Codec[DriverToLauncher](DriverToLauncher).encode)
    outbox.connect("launcher", spec.launcher)
    outbox.send(
        "launcher",
        DriverReady(
            driver=spec.driver,
            address=address,
            host=address_of(connection.node_id),
            cluster=connection.address,
            is_own=connection.is_own,
        ),
    )
    outbox.close()
