"""The life of one engine that is a Ray actor: a place is found for it, it is born, bound, run, watched; and all that
was its own is removed.

A thread of the process that drives Ray, with an outbox of its own to the supervisor's process.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import msgspec

from eagleray.cluster.deadline import Deadline
from eagleray.cluster.engine_actor_handle import EngineActorHandle, open_engine_actor
from eagleray.cluster.nodes import address_of
from eagleray.cluster.placement import EnginePlacement, EnginePlacer
from eagleray.config.resolve import executor_name
from eagleray.errors import EagleRayError
from eagleray.identity import EngineId
from eagleray.log import get_logger
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import Bound, DriverToLauncher, EngineSpec
from eagleray.messages.workers import RayContext
from eagleray.transport.inbox import Outbox

logger = get_logger(__name__)

LOOK_SECONDS = 0.2
"""How often an engine that runs is looked at for whether it is to end. Ray tells at once that it has ended."""


class Cancelled(Exception):
    """To end."""


class RayEngineLifecycle:
    """`cluster`: its address; `launcher`: the address of the inbox that hears of the engine; `target`: see
    `EngineActor.bind`."""

    def __init__(self, spec: EngineSpec, *, places: EnginePlacer, cluster: str, launcher: str, target: str) -> None:
        self._spec = spec
        self._places = places
        self._cluster = cluster
        self._launcher = launcher
        self._target = target
        self._is_told = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"life-of-{spec.engine.label}", daemon=True)
        places.expect(spec.engine)

    def start(self) -> None:
        """Those that are to be placed together are made before one of them is started."""
        self._thread.start()

    @property
    def engine(self) -> EngineId:
        return self._spec.engine

    @property
    def is_over(self) -> bool:
        """And nothing is left of it."""
        return not self._thread.is_alive()

    def end(self) -> None:
        """End the engine at once. From any thread; harmless when repeated."""
        self._is_told.set()

    def wait_until_over(self, deadline: float) -> bool:
        """Whether it is over by `deadline`, on the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.is_over

    def _run(self) -> None:
        outbox: Outbox[str, DriverToLauncher] = Outbox(Codec[DriverToLauncher](DriverToLauncher).encode)
        outbox.connect("launcher", self._launcher)
        ends = ExitStack()
        try:
            outbox.send("launcher", Ended(self.engine, self._live(outbox, ends)))
        finally:
            self._tidy(ends)
            outbox.close()

    def _live(self, outbox: Outbox[str, DriverToLauncher], ends: ExitStack) -> Failure:
        """Why it has ended. `ends` removes what is left of it."""
        try:
            actor = self._give_birth(ends)
            outbox.send("launcher", Bound(self.engine, actor.address))
            actor.run()
            while (cause := actor.exit_reason(LOOK_SECONDS)) is None:
                self._check()
            return cause
        except Cancelled:
            self._tidy(ends)  # only then is it true
            return Failure.noticed("it was told to end")
        except Exception as error:
            if not isinstance(error, EagleRayError):
                logger.exception("%s could not be brought to life", self.engine.label)
            return Failure.of(error)

    def _give_birth(self, ends: ExitStack) -> EngineActorHandle:
        config = self._spec.config
        deadline = Deadline(config.ray.ray_placement_timeout, "ray_placement_timeout", self._check)
        place = self._places.find(self.engine, deadline)
        ends.callback(place.close)
        deadline = Deadline(config.execution.startup_timeout, "startup_timeout", self._check)
        takes = {} if _has_workers_in_bundles(self._spec) else place.size.bundle
        actor = open_engine_actor(
            self._placed(place),
            group_id=place.group_id,
            bundle=place.bundles[0],
            takes=takes,
            target=self._target,
            deadline=deadline,
        )
        ends.callback(actor.kill)
        ends.callback(place.close)  # first: it ends a stopped process, which a kill of the actor does not
        return actor

    def _placed(self, place: EnginePlacement) -> EngineSpec:
        """What the engine is told: where it is, and no longer how to get there."""
        asking = self._spec.ray
        context = RayContext(
            address=self._cluster,
            placement_group=place.group_id,
            caller=asking.caller if asking is not None and asking.placement_group == place.group_id else None,
            bundles=[bundle.index for bundle in place.bundles],
        )
        config = self._spec.config
        ray = msgspec.structs.replace(config.ray, ray_address=None, placement_group=None, bundle_indices=[])
        return msgspec.structs.replace(
            self._spec,
            config=msgspec.structs.replace(config, ray=ray),
            runtime_dir="",
            host=address_of(place.bundles[0].node_id),
            ray=context,
        )

    def _check(self) -> None:
        if self._is_told.is_set():
            raise Cancelled

    def _tidy(self, ends: ExitStack) -> None:
        try:
            ends.close()
        except Exception:  # the edge of this thread; Ray removes the rest with this process
            logger.exception("%s has ended, but something of it is left", self.engine.label)


def _has_workers_in_bundles(spec: EngineSpec) -> bool:
    return executor_name(spec.config, in_placement_group=True) in ("ray", "ray-graph")
