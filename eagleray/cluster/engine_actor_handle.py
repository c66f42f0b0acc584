"""One engine as a Ray actor: brought to life in a bundle, bound, run, watched, ended."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError

from eagleray.cluster.actor_monitor import exit_reason
from eagleray.cluster.bundles import Bundle, Resources
from eagleray.cluster.context import inherited_variables
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.engine_actor import EngineActor
from eagleray.cluster.environment import worker_environment
from eagleray.cluster.ray_errors import summarize
from eagleray.cluster.spawn import ActorHandles, spawn
from eagleray.cluster.worker_actors import check_versions
from eagleray.errors import WorkerLost
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import EngineSpec

LOOK_SECONDS = 0.2


class EngineActorHandle:
    """Alive, its inbox bound. Whoever has it kills it."""

    def __init__(self, actors: ActorHandles, address: str, node_id: str) -> None:
        self.address = address
        self._actors = actors
        self._node_id = node_id
        self._sentinel: Any = None

    def run(self) -> None:
        """Let it be an engine from now on."""
        self._sentinel = self._actors.actors[0].handle.live.remote()

    def exit_reason(self, seconds: float) -> Failure | None:
        """Return why the actor exited; None if it still runs after `seconds`."""
        ready, _ = ray.wait([self._sentinel], timeout=seconds)
        return exit_reason(self._sentinel, self._node_id) if ready else None

    def kill(self) -> None:
        """Harmless when repeated, or when it is dead."""
        self._actors.kill()


def open_engine_actor(
    spec: EngineSpec, *, group_id: str, bundle: Bundle, takes: Resources, target: str, wait: Deadline
) -> EngineActorHandle:
    """Bring the engine of `spec` to life in a bundle of a placement group, of which it `takes` that much.

    `target`: see `EngineActor.bind`. Raises `ClusterError`, `ClusterLost`, `WorkerLost`, or what binding raises,
    and leaves nothing behind then.
    """
    label, instance, options = spec.engine.label, spec.engine.instance, spec.config.ray
    environment = worker_environment(
        os.environ,
        runtime_env=options.ray_runtime_env,
        inherited=inherited_variables(),
        exclude=options.ray_env_exclude,
        include=options.ray_env_include,
        sees_all_devices=not takes,  # it computes nothing itself, and passes on what it knows
    )
    with ExitStack() as undo:
        actors = spawn(
            group_id=group_id,
            bundles=[bundle],
            takes=takes,
            namespace=instance,
            labels=[label],
            environment=environment,
            log_level=spec.config.execution.log_level,
            kind=EngineActor,
            max_concurrency=1,
        )
        undo.callback(actors.kill)
        infos = actors.where(wait)
        check_versions([label], infos)
        address = _bind(actors.actors[0].handle, label, target, spec, wait)
        undo.pop_all()
        return EngineActorHandle(actors, address, infos[0].node_id)


def _bind(handle: Any, label: str, target: str, spec: EngineSpec, wait: Deadline) -> str:
    reference = handle.bind.remote(target, msgspec.msgpack.encode(spec))
    while not ray.wait([reference], timeout=min(LOOK_SECONDS, wait.left))[0]:
        wait.note(partial(str.format, "{} has not bound its inbox", label))
    try:
        address: str = ray.get(reference)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except RayError as error:
        raise WorkerLost(f"{label}: {summarize(str(error))}") from None
    return address
