"""Resources that an actor of a stage reserves, and the check that the cluster can give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from eagleray.cluster.actor_options import as_actor_options, asked_resources
from eagleray.cluster.bundles import Resources, count_fitting, format_resources, worker_resources
from eagleray.cluster.capacity import explain_engine_shortage
from eagleray.cluster.engine_placement import engine_size, takes_bundles
from eagleray.cluster.nodes import Node, check_cluster_can_hold, list_nodes, select_nodes
from eagleray.config.sections import Config

ACTOR_CPUS = 1.0
"""CPUs of an actor whose workers compute elsewhere or on GPUs, for texts and tokens."""

TASK_CPUS = 1.0
"""CPUs of a task of Ray Data. Without them nothing is read, and the actors wait for ever."""

CHECKPOINT_CPUS = 1.0
"""CPUs of the actor by which Ray Data skips the rows of a checkpoint."""


def actor_resources(config: Config, nodes: Sequence[Node]) -> dict[str, float]:
    """Return the resources of an actor: all that its workers need if they are its child processes.

    Engines and workers that are Ray actors have placement groups of their own.
    """
    parallel = config.parallel
    if takes_bundles(config):
        return {"CPU": ACTOR_CPUS}
    worker = worker_resources({}, config.execution.device, [node.total for node in nodes if node.is_alive])
    if "CPU" in worker and config.execution.num_threads is not None:
        worker = {"CPU": float(config.execution.num_threads)}
    count = parallel.world_size * parallel.data_parallel_size
    return {"CPU": ACTOR_CPUS, **{name: amount * count for name, amount in worker.items()}}


def reserve(config: Config, given: Mapping[str, Any], num_actors: int, *, has_checkpoint: bool) -> dict[str, Any]:
    """Return the keywords of `map_batches` with the resources of an actor; `given` replaces those by default.

    Raises `ClusterError` if the cluster can never hold `num_actors` actors beside what Ray Data needs itself.
    """
    if not ray.is_initialized():
        ray.init()
    options = {**as_actor_options(actor_resources(config, list_nodes())), **given}
    resources = {name: amount for name, amount in asked_resources(options).items() if amount}
    own_cpus = TASK_CPUS + CHECKPOINT_CPUS * has_checkpoint
    check_cluster_can_hold(
        lambda nodes: (
            explain_actor_shortage(nodes, resources, num_actors, own_cpus) or explain_group_shortage(config, nodes)
        )
    )
    return options


def explain_actor_shortage(nodes: Sequence[Node], resources: Resources, num_actors: int, own_cpus: float) -> str | None:
    """Return a sentence if the nodes, with nothing on them, cannot hold the actors and `own_cpus` CPUs for Ray Data
    itself; else None."""
    alive = [node for node in nodes if node.is_alive]
    room = sum(count_fitting(node.total, resources) for node in alive) if resources else num_actors
    cpus, per_actor = sum(node.total.get("CPU", 0.0) for node in alive), resources.get("CPU", 0.0)
    if room >= num_actors and cpus >= num_actors * per_actor + own_cpus:
        return None
    if per_actor:
        room = min(room, max(0, int((cpus - own_cpus) / per_actor)))
    names = {*resources, "CPU"}
    has = "; ".join(
        f"node {node.label} has {format_resources({name: node.total.get(name, 0.0) for name in names})}"
        for node in alive
    )
    taken = format_resources(resources or {"CPU": 0.0})
    actors = f"an actor with {taken}" if num_actors == 1 else f"{num_actors} actors with {taken} each"
    if room >= num_actors:
        advice = "add nodes"
    elif room:
        advice = f"set `num_actors` to {room}"
    else:
        advice = "set `actor_options`, such as `num_cpus`, to less, or add nodes"
    return (
        f"the stage needs {actors}, and Ray Data {{CPU: {own_cpus:g}}} for its own tasks, but the cluster has less: "
        f"{has}; {advice}"
    )


def explain_group_shortage(config: Config, nodes: Sequence[Node]) -> str | None:
    """Return a sentence if the nodes, with nothing on them, cannot hold the placement groups of an actor's engines;
    else None."""
    if not takes_bundles(config):
        return None
    usable = [node for node in select_nodes(nodes, config.ray.ray_nodes) if node.is_alive]
    parallel = config.parallel
    shortage = explain_engine_shortage(
        usable,
        engine_size(config, [node.total for node in usable]),
        num_engines=parallel.data_parallel_size,
        policy=config.ray.ray_engine_placement,
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
    )
    return None if shortage.may_pass else shortage.text
