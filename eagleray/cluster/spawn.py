"""Workers as Ray actors: bring them to life in their bundles, ask where they are, let them run, end them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray._private.state import actors as actor_table
from ray.exceptions import ActorDiedError, RayError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from eagleray.cluster import placement_groups
from eagleray.cluster.actor_process import ActorInfo, ActorProcess
from eagleray.cluster.bundles import Bundle, Resources
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.environment import WorkerEnvironment
from eagleray.cluster.ray_errors import summarize
from eagleray.errors import ClusterError, ClusterLost, EagleRayError, WorkerLost
from eagleray.identity import cluster_name
from eagleray.log import get_logger

logger = get_logger(__name__)

LOOK_SECONDS = 0.5
KILL_SECONDS = 5.0

Sentinel = Any
"""A reference that Ray makes ready when the worker has ended, however it ended."""


@dataclass(frozen=True)
class ActorHandle:
    label: str
    handle: Any


class ActorHandles:
    """The actors of one engine, by rank. They exist when Ray has been asked for them; `where` waits until they do."""

    def __init__(
        self,
        actors: Sequence[ActorHandle],
        variables: Mapping[str, str],
        *,
        group_id: str,
        bundles: Sequence[Bundle],
    ) -> None:
        self.actors = actors
        self._group_id = group_id
        self._bundles = bundles
        self._variables = variables
        self._sentinels: list[Sentinel] = []

    def where(self, wait: Deadline) -> list[ActorInfo]:
        """Hand each its environment. What each says of itself. Raises `ClusterError` if it cannot be brought to life,
        `WorkerLost` or `ClusterLost` if it died, or its node."""
        refs = {actor.handle.where.remote(dict(self._variables)): actor for actor in self.actors}
        found: dict[str, ActorInfo] = {}
        waiting = list(refs)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=min(LOOK_SECONDS, wait.left))
            for ref in ready:
                found[refs[ref].label] = _said(refs[ref], ref)
            if not ready:
                late = [refs[ref].label for ref in waiting]
                bundles = [bundle.index for bundle in self._bundles]
                if not placement_groups.have_nodes(self._group_id, bundles):  # Ray would look for others without end
                    raise ClusterLost(f"a node that was to hold {', '.join(late)} is gone")
                wait.note(partial(_silence, late))
        return [found[actor.label] for actor in self.actors]

    def run(self, target: str, payloads: Sequence[bytes]) -> list[Sentinel]:
        """Let each be what `target`, `module:function`, makes of its payload. The sentinels, by rank."""
        self._sentinels = [
            actor.handle.run.remote(target, payload) for actor, payload in zip(self.actors, payloads, strict=True)
        ]
        return self._sentinels

    def wait_until_ended(self, seconds: float) -> None:
        """Wait for those that run to end by themselves; who has not, by then, is in the log."""
        _, late = ray.wait(self._sentinels, num_returns=len(self._sentinels), timeout=seconds)
        for actor, sentinel in zip(self.actors, self._sentinels, strict=True):
            if sentinel in late:
                logger.warning("%s did not end within %.0f s: it is killed", actor.label, seconds)

    def kill(self) -> None:
        """Kill all that are left, and wait until Ray says that they are gone. Harmless when repeated."""
        for actor in self.actors:
            ray.kill(actor.handle)
        deadline = time.monotonic() + KILL_SECONDS
        while left := [actor.label for actor in self.actors if not _is_dead(actor)]:
            if time.monotonic() >= deadline:
                raise EagleRayError(f"Ray has not ended the actors of {', '.join(left)} within {KILL_SECONDS:.0f} s")
            time.sleep(0.01)


def spawn(
    *,
    group_id: str,
    bundles: Sequence[Bundle],
    takes: Resources,
    namespace: str,
    labels: Sequence[str],
    environment: WorkerEnvironment,
    log_level: str,
    kind: type[ActorProcess],
    max_concurrency: int,
) -> ActorHandles:
    """Ask Ray for one actor per rank. Each `takes` these resources of its bundle of the placement group.

    The actors are named `<name of the instance>/<label>`, in the instance's own namespace.
    """
    resources = dict(takes)
    options = {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "memory": resources.pop("memory", None),
        "resources": resources,
        "namespace": namespace,
        "max_concurrency": max_concurrency,
        "max_restarts": 0,
        "runtime_env": environment.runtime_env or None,
    }
    group = placement_groups.handle(group_id)
    actor_class = ray.remote(kind)
    made: list[ActorHandle] = []
    if environment.withheld:
        logger.info(
            "environment variables that may be secrets are not passed on to %s: %s (`ray_env_include` passes one on)",
            ", ".join(labels),
            ", ".join(environment.withheld),
        )
    try:
        for label, bundle in zip(labels, bundles, strict=True):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle.index)
            name = cluster_name(namespace, label)
            handle = actor_class.options(name=name, scheduling_strategy=strategy, **options).remote(label, log_level)
            made.append(ActorHandle(label, handle))
    except Exception as error:
        ActorHandles(made, {}, group_id=group_id, bundles=bundles).kill()
        raise ClusterError(f"Ray does not take the actor of {label}: {summarize(str(error))}") from error
    return ActorHandles(made, environment.variables, group_id=group_id, bundles=bundles)


def _said(actor: ActorHandle, ref: Any) -> ActorInfo:
    try:
        info: ActorInfo = ray.get(ref)
    except RuntimeEnvSetupError as error:
        raise ClusterError(f"{actor.label}: Ray could not set up its runtime_env: {summarize(str(error))}") from None
    except ActorDiedError as error:
        said = f"{actor.label} did not come to life: {summarize(str(error))}"
        if not error.actor_init_failed:  # it was killed, or its node died
            raise WorkerLost(said) from None
        if "No module named 'eagleray" in str(error):
            said += "; eagleray must be installed on every node"
        raise ClusterError(said) from None
    except RayError as error:
        raise WorkerLost(f"worker {actor.label}: {summarize(str(error))}") from None
    return info


def _silence(labels: Sequence[str]) -> str:
    return f"no sign of life from the Ray actors of {', '.join(labels)}"


def _is_dead(actor: ActorHandle) -> bool:
    entry = actor_table(actor.handle._actor_id.hex())
    return not entry or entry["State"] == "DEAD"
