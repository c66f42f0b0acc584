"""The actors of one engine: connected, placed, alive, asked where they are. What each will do is not decided here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from eagleray.cluster.actor_process import ActorInfo, ActorProcess, own_versions
from eagleray.cluster.connect import connect
from eagleray.cluster.context import inherited_variables
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.devices import device_index, may_have_devices
from eagleray.cluster.environment import worker_environment
from eagleray.cluster.local_cluster import OnLost
from eagleray.cluster.nodes import snapshot
from eagleray.cluster.placement import EnginePlacement, place_workers
from eagleray.cluster.spawn import ActorHandles, spawn
from eagleray.config.sections import Config
from eagleray.errors import ClusterError
from eagleray.identity import EngineId, WorkerId
from eagleray.log import get_logger
from eagleray.messages.workers import RayContext, Topology

logger = get_logger(__name__)


@dataclass(frozen=True)
class WorkerActors:
    actors: ActorHandles
    labels: Sequence[str]
    """[world_size] of the workers, by rank"""
    topology: Topology
    devices: Sequence[int | None]
    """[world_size] which of the GPUs that its process sees each worker uses, by rank"""
    engine_node: str
    host: str | None
    """Address at which the workers on other nodes reach the engine; None if there are none."""
    _placement: EnginePlacement
    _ends: ExitStack

    @property
    def near(self) -> list[bool]:
        """[world_size] whether the worker is on the engine's node, by rank"""
        return [node == self.engine_node for node in self.topology.nodes]

    def close(self) -> None:
        """Kill the actors, remove the placement group if it is the engine's own, disconnect. Harmless when repeated."""
        self._ends.close()

    def kill(self) -> None:
        """Kill the actors. Harmless when repeated."""
        with ExitStack() as both:
            both.callback(self.actors.kill)
            both.callback(self._placement.close)  # first: it ends a stopped process, which a kill of the actor does not


def open_worker_actors(
    engine: EngineId,
    config: Config,
    *,
    context: RayContext | None,
    wait: Deadline,
    kind: type[ActorProcess] = ActorProcess,
    max_concurrency: int = 1,
    on_lost: OnLost | None = None,
) -> WorkerActors:
    """Bring the actors of `engine` to life. `context`: the cluster and placement group that the asking program is in.

    `kind`: the actors' class; `max_concurrency`: the threads that their methods run in (1: the process's main thread);
    `on_lost`: see `connect`.
    Raises `ClusterError`, `ConfigError` or `WorkerLost`, and leaves nothing behind then.
    """
    with ExitStack() as ends:
        is_actor = context is not None and bool(context.bundles)
        asked = None if context is None or is_actor else context.address
        connection = connect(
            config.ray.ray_address or asked,
            namespace=engine.instance,
            program=context,
            keep=config.ray.ray_env_include,
            on_lost=on_lost,
        )
        ends.callback(connection.close)
        is_same_cluster = context is not None and (is_actor or context.address == connection.address)
        placement = place_workers(
            engine,
            config,
            engine_node=connection.node_id,
            current_group=context.placement_group if context is not None and is_same_cluster else None,
            current_bundles=context.bundles if context is not None and is_same_cluster else (),
            caller=context.caller if context is not None else None,
        )
        ends.callback(placement.close)
        labels = _labels(engine, config)
        actors = _spawn(engine, config, placement, labels, kind, max_concurrency)
        ends.callback(actors.kill)
        ends.callback(placement.close)
        infos = actors.where(wait)
        check_versions(labels, infos)
        addresses = {node.node_id: node.ip for node in snapshot()}
        topology, devices = resolve_topology(config, infos, addresses)
        warn_of_network(engine.label, config, topology)
        has_others = any(node != connection.node_id for node in topology.nodes)
        return WorkerActors(
            actors=actors,
            labels=labels,
            topology=topology,
            devices=devices,
            engine_node=connection.node_id,
            host=addresses[connection.node_id] if has_others else None,
            _placement=placement,
            _ends=ends.pop_all(),
        )


def resolve_topology(
    config: Config, infos: Sequence[ActorInfo], addresses: Mapping[str, str]
) -> tuple[Topology, list[int | None]]:
    """Who is where, and which GPU each worker uses. `infos` by rank; `addresses`: node id to IP. Pure."""
    topology = Topology(
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
        nodes=[info.node_id for info in infos],
        addresses=[addresses[info.node_id] for info in infos],
    )
    devices = [device_index(info.accelerator_ids, info.visible_devices) for info in infos]
    # Where Ray has assigned none (a custom resource stands for the GPUs), the workers of a node take one each, if there
    # are any.
    own = [topology.local_ranks(rank).index(rank) for rank in range(topology.world_size)]
    return topology, [place if index is None else index for index, place in zip(devices, own, strict=True)]


def warn_of_network(label: str, config: Config, topology: Topology) -> None:
    """Say which nodes the workers of a stage are on if they are on several, unless that was asked for."""
    tensor = topology.tensor_parallel_size
    stages = [range(first, first + tensor) for first in range(0, topology.world_size, tensor)]
    apart = [stage for stage in stages if len({topology.nodes[rank] for rank in stage}) > 1]
    if not apart or config.ray.ray_placement_strategy in ("SPREAD", "STRICT_SPREAD"):
        return
    nodes = sorted({f"{topology.addresses[rank]} ({topology.nodes[rank][:8]})" for stage in apart for rank in stage})
    logger.warning(
        "%s: the %d workers of a tensor-parallel group are on %d nodes (%s): every layer waits for the network "
        "between them; a smaller `tensor_parallel_size` with `pipeline_parallel_size` stages avoids that, and "
        "`ray_placement_strategy` STRICT_PACK refuses it",
        label,
        tensor,
        len(nodes),
        ", ".join(nodes),
    )


def _labels(engine: EngineId, config: Config) -> list[str]:
    tensor = config.parallel.tensor_parallel_size
    return [WorkerId(engine, tp=rank % tensor, pp=rank // tensor).label for rank in range(config.parallel.world_size)]


def _spawn(
    engine: EngineId,
    config: Config,
    placement: EnginePlacement,
    labels: Sequence[str],
    kind: type[ActorProcess],
    max_concurrency: int,
) -> ActorHandles:
    environment = worker_environment(
        os.environ,
        runtime_env=config.ray.ray_runtime_env,
        inherited=inherited_variables(),
        exclude=config.ray.ray_env_exclude,
        include=config.ray.ray_env_include,
        sees_all_devices=may_have_devices(placement.size.bundle),
    )
    return spawn(
        group_id=placement.group_id,
        bundles=placement.bundles,
        takes=placement.size.bundle,
        namespace=engine.instance,
        labels=labels,
        environment=environment,
        log_level=config.execution.log_level,
        kind=kind,
        max_concurrency=max_concurrency,
    )


def check_versions(labels: Sequence[str], infos: Sequence[ActorInfo]) -> None:
    """Raises `ClusterError` unless every node runs what we run."""
    for label, info in zip(labels, infos, strict=True):
        logger.info("%s: node %s (%s), process %d", label, info.hostname, info.node_id[:8], info.pid)
        for what, ours in own_versions().items():
            if info.versions[what] != ours:
                raise ClusterError(
                    f"{label} on node {info.hostname} runs {what} {info.versions[what]}, but who starts it {ours}: "
                    "every node needs the same"
                )
    slow = sorted({info.hostname for info in infos if info.niceness > 0})
    if slow:
        logger.warning(
            "Ray runs workers at low priority, and they may not raise it, on %s: start Ray there with "
            "RAY_worker_niceness=0, or steps will wait for whatever else runs",
            ", ".join(slow),
        )
