"""Actors of an engine's workers: placed, created, and asked where they run. What each will run is decided elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from eagleray.cluster.actor_process import ActorInfo, ActorProcess, own_versions
from eagleray.cluster.connect import connect
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.local_cluster import OnLost
from eagleray.cluster.nodes import list_nodes
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
    """[world_size] labels of the workers, by rank"""
    topology: Topology
    devices: Sequence[int | None]
    """[world_size] index of the GPU that each worker uses, among those its process sees, by rank"""
    engine_node: str
    host: str | None
    """Address at which the workers on other nodes reach the engine; None if all are on the engine's node."""
    _placement: EnginePlacement
    _exit_stack: ExitStack

    @property
    def is_local(self) -> list[bool]:
        """[world_size] whether the worker is on the engine's node, by rank"""
        return [node == self.engine_node for node in self.topology.nodes]

    def close(self) -> None:
        """Kill the actors, remove the placement group if it is the engine's own, disconnect. Idempotent."""
        self._exit_stack.close()

    def kill(self) -> None:
        """Kill the actors. Idempotent."""
        with ExitStack() as stack:
            stack.callback(self.actors.kill)
            stack.callback(self._placement.close)  # first: it kills a stopped process, which `ray.kill` does not


def open_worker_actors(
    engine: EngineId,
    config: Config,
    *,
    context: RayContext | None,
    deadline: Deadline,
    kind: type[ActorProcess] = ActorProcess,
    max_concurrency: int = 1,
    on_lost: OnLost | None = None,
) -> WorkerActors:
    """Create the actors of an engine's workers.

    `context`: the cluster and placement group of the program that asks; `kind`, `max_concurrency`: see `spawn`;
    `on_lost`: see `connect`.
    Raises `ClusterError`, `ConfigError` or `WorkerLost`, and leaves nothing behind then.
    """
    with ExitStack() as stack:
        is_actor = context is not None and bool(context.bundles)
        address = None if context is None or is_actor else context.address
        connection = connect(
            config.ray.ray_address or address,
            namespace=engine.instance,
            program=context,
            keep=config.ray.ray_env_include,
            on_lost=on_lost,
        )
        stack.callback(connection.close)
        is_same_cluster = context is not None and (is_actor or context.address == connection.address)
        placement = place_workers(
            engine, config, engine_node=connection.node_id, context=context if is_same_cluster else None
        )
        stack.callback(placement.close)
        labels = _labels(engine, config)
        actors = spawn(
            engine.instance,
            labels,
            config,
            group_id=placement.group_id,
            bundles=placement.bundles,
            takes=placement.size.bundle,
            # a resource of the user's own may stand for a GPU
            sees_all_devices=not placement.size.bundle.keys() <= {"CPU", "memory"},
            kind=kind,
            max_concurrency=max_concurrency,
        )
        stack.callback(actors.kill)
        stack.callback(placement.close)  # before the kill, as in `WorkerActors.kill`
        infos = actors.get_info(deadline)
        check_versions(labels, infos)
        addresses = {node.node_id: node.ip for node in list_nodes()}
        topology, devices = resolve_topology(config, infos, addresses)
        warn_of_network(engine.label, config, topology)
        has_remote = any(node != connection.node_id for node in topology.nodes)
        return WorkerActors(
            actors=actors,
            labels=labels,
            topology=topology,
            devices=devices,
            engine_node=connection.node_id,
            host=addresses[connection.node_id] if has_remote else None,
            _placement=placement,
            _exit_stack=stack.pop_all(),
        )


def resolve_topology(
    config: Config, infos: Sequence[ActorInfo], addresses: Mapping[str, str]
) -> tuple[Topology, list[int | None]]:
    """Return the topology, and the GPU that each worker uses. `infos` by rank; `addresses`: node id to IP. Pure."""
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
    return topology, [local if index is None else index for index, local in zip(devices, own, strict=True)]


def device_index(assigned: Sequence[str], visible: str | None) -> int | None:
    """Return the position, among the GPUs that the process sees, of the first one that Ray has assigned; None if it
    assigned none. Pure.

    Ray is told not to rewrite CUDA_VISIBLE_DEVICES: every worker of a node sees the GPUs of the node's raylet, so that
    workers can reach each other's memory, and uses the GPU that Ray has assigned to it. `assigned` are ids as
    CUDA_VISIBLE_DEVICES has them: numbers, or names of GPUs and their slices.
    """
    if not assigned:
        return None
    names = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    if names is not None and assigned[0] in names:
        return names.index(assigned[0])
    if names is None and assigned[0].isdigit():
        return int(assigned[0])
    raise ClusterError(
        f"Ray assigned GPU {assigned[0]} to a worker, but its process has CUDA_VISIBLE_DEVICES={visible}: do not set "
        "CUDA_VISIBLE_DEVICES in `ray_runtime_env`"
    )


def warn_of_network(label: str, config: Config, topology: Topology) -> None:
    """Log the nodes of a stage whose workers are on several, unless the strategy asks for that."""
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


def check_versions(labels: Sequence[str], infos: Sequence[ActorInfo]) -> None:
    """Raise `ClusterError` unless every node runs the versions that run here. Log where each actor runs."""
    for label, info in zip(labels, infos, strict=True):
        logger.info("%s: node %s (%s), process %d", label, info.hostname, info.node_id[:8], info.pid)
        for package, ours in own_versions().items():
            if info.versions[package] != ours:
                raise ClusterError(
                    f"{label} on node {info.hostname} runs {package} {info.versions[package]}, but the program that "
                    f"starts it {ours}: every node needs the same"
                )
    slow = sorted({info.hostname for info in infos if info.niceness > 0})
    if slow:
        logger.warning(
            "Ray runs workers at low priority, and they may not raise it, on %s: start Ray there with "
            "RAY_worker_niceness=0, or steps will wait for whatever else runs",
            ", ".join(slow),
        )
