"""The process that drives Ray: creates the engines that are Ray actors, monitors them and kills them. A child of the
supervisor's process, on behalf of its `RayLauncher`.

Nothing that it creates is detached: however this process exits, Ray kills the actors and removes the placement groups.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from eagleray.cluster import placement_groups
from eagleray.cluster.connect import Connection, connect
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.engine_actor_handle import EngineActorHandle, open_engine_actor
from eagleray.cluster.nodes import address_of, list_nodes, select_nodes
from eagleray.cluster.placement import DedicatedGroups, EnginePlacement, EnginePlacer, UserGroup
from eagleray.config.resolve import executor_name
from eagleray.errors import DeadlineExceeded, EagleRayError
from eagleray.fleet import timeouts
from eagleray.fleet.drain_watcher import DrainWatcher
from eagleray.identity import EngineId
from eagleray.log import get_logger
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import (
    Bound,
    DriverReady,
    DriverSpec,
    DriverToLauncher,
    EngineSpec,
    KillEngine,
    LauncherToDriver,
    SpawnEngine,
)
from eagleray.messages.workers import RayContext
from eagleray.process.parent import Parent
from eagleray.transport.heartbeat import HeartbeatSender
from eagleray.transport.inbox import Inbox, Outbox

logger = get_logger(__name__)

LAUNCHER = "launcher"
"""Key of the launcher in outboxes."""


def run(payload: bytes, parent: Parent) -> None:
    """Run the driver that `payload`, an encoded `DriverSpec`, describes, until SIGTERM."""
    spec = msgspec.msgpack.decode(payload, type=DriverSpec)
    options = spec.config.ray
    with ExitStack() as stack:
        with parent.reporting_failure():
            connection = connect(
                options.ray_address or (None if spec.ray is None else spec.ray.address),
                namespace=spec.driver.instance,
                program=spec.ray,
                keep=options.ray_env_include,
                on_lost=parent.report_failure,
            )
            stack.callback(connection.close)
            placer = _open_placer(spec, connection)
            select_nodes(list_nodes(), options.ray_nodes)  # raises now if a given name is of no node
        inbox: Inbox[LauncherToDriver] = Inbox(
            Path(spec.runtime_dir), f"{spec.driver.label}-{spec.driver.incarnation}", Codec(LauncherToDriver).decode
        )
        stack.callback(inbox.close)
        stack.callback(HeartbeatSender.start(spec.heartbeat, on_silent=_ignore_silence).close)
        _report_ready(spec, connection, inbox.address)
        driver = Driver(spec, placer=placer, cluster=connection.address)
        stack.callback(driver.close)
        stack.callback(DrainWatcher.start(placer, partial(_open_outbox, spec.launcher)).close)
        while True:
            driver.handle(_receive_batch(inbox))


def _ignore_silence(seconds: float) -> None:
    """Continue: a supervisor that was stopped for a while is no reason to exit, and `Parent` notices its exit."""


def _receive_batch(inbox: Inbox[LauncherToDriver]) -> list[LauncherToDriver]:
    """Receive a message and all that arrive together with it, or none after a while without one."""
    messages = []
    message = inbox.receive(timeouts.DRIVER_POLL_INTERVAL_SECONDS)
    while message is not None:
        messages.append(message)
        message = inbox.receive(timeouts.SPAWN_BATCH_SECONDS)
    return messages


def _open_placer(spec: DriverSpec, connection: Connection) -> EnginePlacer:
    """Choose the placement group of the options or of the asking program, or else a dedicated group for each engine."""
    program = spec.ray if spec.ray is not None and spec.ray.address == connection.address else RayContext(address="")
    given = spec.config.ray.placement_group or program.placement_group
    if given is None:
        return DedicatedGroups(spec.config, preferred_node=connection.node_id)
    group_id = placement_groups.find(given)
    caller = program.caller if group_id == program.placement_group else None
    return UserGroup(spec.config, group_id, preferred_node=connection.node_id, caller=caller)


def _report_ready(spec: DriverSpec, connection: Connection, address: str) -> None:
    outbox = _open_outbox(spec.launcher)
    outbox.send(
        LAUNCHER,
        DriverReady(
            driver=spec.driver,
            address=address,
            host=address_of(connection.node_id),
            cluster=connection.address,
            is_own=connection.is_own,
        ),
    )
    outbox.close()


def _open_outbox(launcher: str) -> Outbox[str, DriverToLauncher]:
    outbox: Outbox[str, DriverToLauncher] = Outbox(Codec[DriverToLauncher](DriverToLauncher).encode)
    outbox.connect(LAUNCHER, launcher)
    return outbox


class Driver:
    """Owns the lifecycles of the engines. `cluster` is the address of the cluster."""

    def __init__(self, spec: DriverSpec, *, placer: EnginePlacer, cluster: str) -> None:
        self._spec = spec
        self._placer = placer
        self._cluster = cluster
        self._lifecycles: dict[EngineId, RayEngineLifecycle] = {}

    def handle(self, messages: Sequence[LauncherToDriver]) -> None:
        """Handle a batch of messages. All lifecycles of a batch exist before the first one starts, so that their
        engines are placed together."""
        new: dict[EngineId, RayEngineLifecycle] = {}
        for message in messages:
            match message:
                case SpawnEngine(spec):
                    new[spec.engine] = RayEngineLifecycle(
                        spec, driver=self._spec, placer=self._placer, cluster=self._cluster
                    )
                case KillEngine(engine):
                    if lifecycle := new.get(engine) or self._lifecycles.get(engine):
                        lifecycle.cancel()
        for lifecycle in new.values():
            lifecycle.start()
        running = {engine: lifecycle for engine, lifecycle in self._lifecycles.items() if not lifecycle.has_ended}
        self._lifecycles = running | new

    def close(self) -> None:
        """Kill every engine that is left. Raises `DeadlineExceeded` with the engines that Ray has not removed."""
        seconds = timeouts.ACTORS_STOP_TIMEOUT_SECONDS
        deadline = time.monotonic() + seconds
        for lifecycle in self._lifecycles.values():
            lifecycle.cancel()
        late = [engine.label for engine, one in self._lifecycles.items() if not one.wait_until_ended(deadline)]
        if late:
            raise DeadlineExceeded(f"Ray has not ended {', '.join(late)} within {seconds:.0f} s")


class Cancelled(Exception):
    """The engine is to be killed."""


class RayEngineLifecycle:
    """An engine that is a Ray actor: it is placed, created, bound, run and monitored; then everything that belongs to
    it is removed.

    Runs in a thread of its own, with an outbox of its own. `driver` is the spec of this process, `cluster` the address
    of the cluster.
    """

    def __init__(self, spec: EngineSpec, *, driver: DriverSpec, placer: EnginePlacer, cluster: str) -> None:
        self._spec = spec
        self._driver = driver
        self._placer = placer
        self._cluster = cluster
        self._is_cancelled = threading.Event()
        self._exit_stack = ExitStack()
        """Removes whatever belongs to the engine."""
        self._thread = threading.Thread(target=self._run, name=f"life-of-{spec.engine.label}", daemon=True)
        placer.expect(spec.engine, spec.num_engines)

    def start(self) -> None:
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the engine is left."""
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Have the engine killed. From any thread; harmless when repeated."""
        self._is_cancelled.set()

    def wait_until_ended(self, deadline: float) -> bool:
        """Whether the lifecycle has ended by `deadline`, on the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.has_ended

    def _run(self) -> None:
        outbox = _open_outbox(self._driver.launcher)
        try:
            outbox.send(LAUNCHER, Ended(self._spec.engine, self._run_actor(outbox)))
        finally:
            self._clean_up()
            outbox.close()

    def _run_actor(self, outbox: Outbox[str, DriverToLauncher]) -> Failure:
        """Create the actor and wait for its exit. Returns the cause."""
        engine = self._spec.engine
        try:
            actor = self._create_actor()
            outbox.send(LAUNCHER, Bound(engine, actor.address))
            while (cause := actor.exit_reason(timeouts.ACTOR_POLL_INTERVAL_SECONDS)) is None:
                self._check_cancelled()
            return cause
        except Cancelled:
            self._clean_up()  # before the report, which says that the engine is gone
            return Failure.noticed("it was told to end")
        except Exception as error:
            if not isinstance(error, EagleRayError):
                logger.exception("%s could not be created", engine.label)
            return Failure.of(error)

    def _create_actor(self) -> EngineActorHandle:
        config = self._spec.config
        deadline = Deadline(config.ray.ray_placement_timeout, "ray_placement_timeout", self._check_cancelled)
        placement = self._placer.find(self._spec.engine, deadline)
        self._exit_stack.callback(placement.close)
        deadline = Deadline(config.execution.startup_timeout, "startup_timeout", self._check_cancelled)
        has_workers_in_bundles = executor_name(config, in_placement_group=True) in ("ray", "ray-graph")
        actor = open_engine_actor(
            self._placed_spec(placement),
            group_id=placement.group_id,
            bundle=placement.bundles[0],
            takes={} if has_workers_in_bundles else placement.size.bundle,
            target=self._driver.engine_target,
            deadline=deadline,
        )
        self._exit_stack.callback(actor.kill)
        # The group is removed first, because that ends a stopped process, which killing the actor does not.
        self._exit_stack.callback(placement.close)
        return actor

    def _placed_spec(self, placement: EnginePlacement) -> EngineSpec:
        """Return the engine's spec with its placement instead of the options that led to it."""
        program = self._spec.ray
        context = RayContext(
            address=self._cluster,
            placement_group=placement.group_id,
            caller=program.caller if program is not None and program.placement_group == placement.group_id else None,
            bundles=[bundle.index for bundle in placement.bundles],
        )
        config = self._spec.config
        ray = msgspec.structs.replace(config.ray, ray_address=None, placement_group=None, bundle_indices=[])
        return msgspec.structs.replace(
            self._spec,
            config=msgspec.structs.replace(config, ray=ray),
            runtime_dir="",
            host=address_of(placement.bundles[0].node_id),
            ray=context,
        )

    def _check_cancelled(self) -> None:
        if self._is_cancelled.is_set():
            raise Cancelled

    def _clean_up(self) -> None:
        try:
            self._exit_stack.close()
        except Exception:  # nothing above this thread would catch it, and Ray removes the rest with this process
            logger.exception(
                "%s has ended, but Ray removes the rest of it only when this process exits", self._spec.engine.label
            )
