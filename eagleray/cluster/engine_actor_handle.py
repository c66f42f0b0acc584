"""Handle of an engine that is a Ray actor: created in a bundle, bound, monitored, killed."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError

from eagleray.cluster.actor_monitor import exit_reason
from eagleray.cluster.actor_process import EngineActor
from eagleray.cluster.bundles import Bundle, Resources
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.ray_errors import summarize
from eagleray.cluster.spawn import ActorHandles, Sentinel, spawn
from eagleray.cluster.timeouts import WAIT_SECONDS
from eagleray.cluster.worker_actors import check_versions
from eagleray.errors import WorkerLost
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import EngineSpec


class EngineActorHandle:
    """An actor whose inbox is bound and whose engine waits to be attached. The owner kills it."""

    def __init__(self, actors: ActorHandles, address: str, node_id: str) -> None:
        self.address = address
        self._actors = actors
        self._node_id = node_id
        self._sentinel: Sentinel = actors.handles[0].serve.remote()

    def exit_reason(self, seconds: float) -> Failure | None:
        """Return why the actor has exited; None if it still runs after `seconds`."""
        ready, _ = ray.wait([self._sentinel], timeout=seconds)
        return exit_reason(self._sentinel, self._node_id) if ready else None

    def kill(self) -> None:
        """Kill the actor. Idempotent; a dead actor is ignored."""
        self._actors.kill()


def open_engine_actor(
    spec: EngineSpec, *, group_id: str, bundle: Bundle, takes: Resources, target: str, deadline: Deadline
) -> EngineActorHandle:
    """Create the actor of an engine in a bundle of a placement group, of which it `takes` these resources, and bind it.

    `target`: see `EngineActor.bind`. Raises `ClusterError`, `ClusterLost`, `WorkerLost`, or what binding raises,
    and leaves nothing behind then.
    """
    label = spec.engine.label
    with ExitStack() as undo:
        actors = spawn(
            spec.engine.instance,
            [label],
            spec.config,
            group_id=group_id,
            bundles=[bundle],
            takes=takes,
            sees_all_devices=not takes,  # an engine without resources computes nothing, and its workers inherit this
            kind=EngineActor,
        )
        undo.callback(actors.kill)
        infos = actors.get_info(deadline)
        check_versions([label], infos)
        address = _bind(actors.handles[0], label, target, spec, deadline)
        handle = EngineActorHandle(actors, address, infos[0].node_id)
        undo.pop_all()
        return handle


def _bind(handle: Any, label: str, target: str, spec: EngineSpec, deadline: Deadline) -> str:
    reference = handle.bind.remote(target, msgspec.msgpack.encode(spec))
    while not ray.wait([reference], timeout=min(WAIT_SECONDS, deadline.remaining))[0]:
        deadline.check(partial(str.format, "{} has not bound its inbox", label))
    try:
        address: str = ray.get(reference)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except RayError as error:
        raise WorkerLost(f"{label}: {summarize(str(error))}") from None
    return address
