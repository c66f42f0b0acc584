"""Resources of a replica: configuration x resources of the nodes -> executor, actor options, bundles. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from eagleray.cluster.actor_options import asked_resources
from eagleray.cluster.bundles import Resources, count_fitting, format_resources, subtract_held
from eagleray.cluster.engine_placement import engine_size, round_up_amount, takes_bundles
from eagleray.config.resolve import executor_name
from eagleray.config.sections import Config
from eagleray.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReplicaResources:
    """Resources of one replica. Engines whose workers are Ray actors take `bundles`; others run as children of the
    replica, on what its actor holds."""

    replica: Mapping[str, float]
    """Resources of the replica's actor, and of the first bundle of its placement group."""
    bundles: Sequence[Mapping[str, float]]
    """Bundle of each worker, or of each engine that computes itself; empty: the replica needs no placement group."""
    strategy: str
    """Strategy of the placement group."""


def with_executor(config: Config) -> Config:
    """Return the configuration with the executor of a replica instead of `auto`: workers in bundles of its placement
    group if there are several to an engine, or if options of Ray ask for it; otherwise children of the replica.

    Raises `ConfigError` for several engines in one process group that would share bundles.
    """
    parallel = config.parallel
    has_one_engine = parallel.data_parallel_size == 1
    name = executor_name(config, in_placement_group=parallel.world_size > 1 and has_one_engine)
    if name in ("ray", "ray-graph") and parallel.data_parallel_backend == "processes" and not has_one_engine:
        raise ConfigError(
            f"option `data_parallel_size` {parallel.data_parallel_size}: engines that are processes of the replica "
            "cannot share its placement group: give data_parallel_backend ray, or executor in-process or processes"
        )
    return msgspec.structs.replace(config, execution=msgspec.structs.replace(config.execution, executor=name))


def replica_resources(
    config: Config, offered: Iterable[Resources], *, actor_options: Mapping[str, Any]
) -> ReplicaResources:
    """Return the resources of a replica. `config`: that of `with_executor`; `offered`: all resources of each node;
    `actor_options`: the user's `ray_actor_options`, whose amounts replace ours."""
    size, num_engines = engine_size(config, offered), config.parallel.data_parallel_size
    given = asked_resources(actor_options)
    if takes_bundles(config):
        bundles = [dict(size.bundle)] * (size.num_bundles * num_engines)
        return ReplicaResources(
            replica=_needed({"CPU": 1.0} | given), bundles=bundles, strategy=config.ray.ray_placement_strategy
        )
    held = {name: round_up_amount(amount * num_engines) for name, amount in size.bundle.items()}
    return ReplicaResources(replica=_needed({"CPU": 1.0} | held | given), bundles=(), strategy="PACK")


def explain_replica_shortage(resources: ReplicaResources, nodes: Sequence[Resources]) -> str | None:
    """Return a sentence if empty nodes could not hold one replica; else None. `nodes`: all resources of each node."""
    if any(_fits_around(index, resources, nodes) for index in range(len(nodes))):
        return None
    workers = f" and {len(resources.bundles)} x {format_resources(resources.bundles[0])}" if resources.bundles else ""
    have = "; ".join(format_resources({name: node.get(name, 0.0) for name in _names(resources)}) for node in nodes)
    return (
        f"no replica fits into the cluster: one takes {format_resources(resources.replica)} for itself{workers} "
        f"({resources.strategy}), and the nodes have {have or 'nothing'}: add nodes, give a smaller "
        "`tensor_parallel_size`, `pipeline_parallel_size` or `data_parallel_size`, or `ray_worker_resources` and "
        "`ray_actor_options` in `deployment` that fit"
    )


def _fits_around(index: int, resources: ReplicaResources, nodes: Sequence[Resources]) -> bool:
    """Whether a replica whose actor is on node `index` fits into empty nodes."""
    node = nodes[index]
    if resources.replica and not count_fitting(node, resources.replica):
        return False
    if not resources.bundles:
        return True
    bundle = resources.bundles[0]
    here = count_fitting(subtract_held(node, resources.replica), bundle)
    others = [count_fitting(other, bundle) for position, other in enumerate(nodes) if position != index]
    match resources.strategy:
        case "STRICT_PACK":
            room = here
        case "STRICT_SPREAD":
            room = sum(count > 0 for count in others)
        case _:
            room = here + sum(others)
    return room >= len(resources.bundles)


def _names(resources: ReplicaResources) -> list[str]:
    return sorted({name for bundle in (resources.replica, *resources.bundles) for name in bundle})


def _needed(amounts: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in amounts.items() if amount > 0}
