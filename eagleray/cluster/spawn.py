"""Creation of Ray actors in their bundles, and the handles to them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray._private.state import actors as actor_table
from ray.exceptions import ActorDiedError, RayError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from eagleray.cluster import placement_groups
from eagleray.cluster.actor_process import ActorInfo, ActorProcess
from eagleray.cluster.bundles import Bundle, Resources
from eagleray.cluster.context import inherited_variables
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.environment import worker_environment
from eagleray.cluster.ray_errors import summarize
from eagleray.cluster.timeouts import KILL_SECONDS, WAIT_SECONDS
from eagleray.config.log_config import log_settings
from eagleray.config.sections import Config
from eagleray.errors import ClusterError, ClusterLost, EagleRayError, WorkerLost
from eagleray.identity import cluster_name
from eagleray.log import LogSettings, get_logger

logger = get_logger(__name__)

Sentinel = Any
"""A reference that Ray makes ready when the actor has exited, however it exited."""


class ActorHandles:
    """Handles of the actors of one engine, by rank.

    They exist once Ray has been asked for the actors; `get_info` waits until these run.
    """

    def __init__(
        self,
        labels: Sequence[str],
        handles: Sequence[Any],
        variables: Mapping[str, str],
        *,
        log: LogSettings,
        group_id: str,
        bundles: Sequence[Bundle],
    ) -> None:
        self.handles = handles
        self._labels = labels
        self._variables = variables
        self._log = log
        self._group_id = group_id
        self._indices = [bundle.index for bundle in bundles]
        self._sentinels: list[Sentinel] = []

    def get_info(self, deadline: Deadline) -> list[ActorInfo]:
        """Send each actor its environment and the settings of the log, and return where each runs, by rank.

        Raises `ClusterError` for an actor that cannot be created, `WorkerLost` or `ClusterLost` if it died, or its
        node.
        """
        refs = [handle.get_info.remote(dict(self._variables), self._log) for handle in self.handles]
        labels = dict(zip(refs, self._labels, strict=True))
        found: dict[Any, ActorInfo] = {}
        waiting = list(refs)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=min(WAIT_SECONDS, deadline.remaining))
            for ref in ready:
                found[ref] = _get_info(labels[ref], ref)
            if not ready:
                late = ", ".join(labels[ref] for ref in waiting)
                # Ray would look for other nodes for the bundles, without end.
                if not placement_groups.have_nodes(self._group_id, self._indices):
                    raise ClusterLost(f"a node that was to hold {late} is gone")
                deadline.check(partial(str.format, "no sign of life from the Ray actors of {}", late))
        return [found[ref] for ref in refs]

    def run(self, target: str, payloads: Sequence[bytes]) -> list[Sentinel]:
        """Let each actor call `target`, `module:function`, with its payload. Returns the sentinels, by rank."""
        self._sentinels = [
            handle.run.remote(target, payload) for handle, payload in zip(self.handles, payloads, strict=True)
        ]
        return self._sentinels

    def wait_for_exit(self, seconds: float) -> None:
        """Wait for the running actors to exit by themselves; log the labels of those still running after `seconds`."""
        _, late = ray.wait(self._sentinels, num_returns=len(self._sentinels), timeout=seconds)
        for label, sentinel in zip(self._labels, self._sentinels, strict=True):
            if sentinel in late:
                logger.warning("%s did not exit within %.0f s: killing it", label, seconds)

    def kill(self) -> None:
        """Kill all actors, and wait until Ray reports them dead. Idempotent."""
        for handle in self.handles:
            ray.kill(handle)
        deadline = time.monotonic() + KILL_SECONDS
        while left := [label for label, handle in zip(self._labels, self.handles, strict=True) if not _is_dead(handle)]:
            if time.monotonic() >= deadline:
                raise EagleRayError(f"Ray has not ended the actors of {', '.join(left)} within {KILL_SECONDS:.0f} s")
            time.sleep(0.01)


def spawn(
    instance: str,
    labels: Sequence[str],
    config: Config,
    *,
    group_id: str,
    bundles: Sequence[Bundle],
    takes: Resources,
    sees_all_devices: bool,
    kind: type[ActorProcess] = ActorProcess,
    max_concurrency: int = 1,
) -> ActorHandles:
    """Ask Ray for one actor per label. Each `takes` these resources of its bundle of the placement group.

    The actors are named `<name of the instance>/<label>`, in the instance's own namespace. `sees_all_devices`: see
    `worker_environment`; `kind`: the actors' class; `max_concurrency`: number of threads that run their methods (1: the
    process's main thread).
    """
    environment = worker_environment(
        os.environ,
        runtime_env=config.ray.ray_runtime_env,
        inherited=inherited_variables(),
        exclude=config.ray.ray_env_exclude,
        include=config.ray.ray_env_include,
        sees_all_devices=sees_all_devices,
    )
    resources = dict(takes)
    options = {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "memory": resources.pop("memory", None),
        "resources": resources,
        "namespace": instance,
        "max_concurrency": max_concurrency,
        "max_restarts": 0,
        "runtime_env": environment.runtime_env or None,
    }
    group = placement_groups.handle(group_id)
    actor_class = ray.remote(kind)
    if environment.withheld:
        logger.info(
            "environment variables that may be secrets are not passed on to %s: %s (`ray_env_include` passes one on)",
            ", ".join(labels),
            ", ".join(environment.withheld),
        )
    log = log_settings(config)
    handles: list[Any] = []
    for label, bundle in zip(labels, bundles, strict=True):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle.index)
        name = cluster_name(instance, label)
        try:
            handle = actor_class.options(name=name, scheduling_strategy=strategy, **options).remote(label)
        except Exception as error:
            ActorHandles(labels[: len(handles)], handles, {}, log=log, group_id=group_id, bundles=bundles).kill()
            raise ClusterError(f"Ray does not take the actor of {label}: {summarize(str(error))}") from error
        handles.append(handle)
    return ActorHandles(labels, handles, environment.variables, log=log, group_id=group_id, bundles=bundles)


def _get_info(label: str, ref: Any) -> ActorInfo:
    try:
        info: ActorInfo = ray.get(ref)
    except RuntimeEnvSetupError as error:
        raise ClusterError(f"{label}: Ray could not set up its runtime_env: {summarize(str(error))}") from None
    except ActorDiedError as error:
        text = f"{label} did not come to life: {summarize(str(error))}"
        if not error.actor_init_failed:  # it was killed, or its node died
            raise WorkerLost(text) from None
        if "No module named 'eagleray" in str(error):
            text += "; eagleray must be installed on every node"
        raise ClusterError(text) from None
    except RayError as error:
        raise WorkerLost(f"worker {label}: {summarize(str(error))}") from None
    return info


def _is_dead(handle: Any) -> bool:
    entry = actor_table(handle._actor_id.hex())
    return not entry or entry["State"] == "DEAD"
