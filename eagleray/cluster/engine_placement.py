"""Placement of engines: nodes x size x running engines -> the node of each bundle. Pure.

All engines of an instance have the same size, so capacity is counted in bundles of it. The workers of one engine that
runs already are placed as the only engine there is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from eagleray.cluster.bundles import (
    Bundle,
    Resources,
    count_fitting,
    format_bundles,
    format_resources,
    in_rank_order,
    keep_stages_together,
    worker_resources,
)
from eagleray.cluster.nodes import Node
from eagleray.config.resolve import executor_name
from eagleray.config.sections import Config
from eagleray.errors import ClusterError
from eagleray.identity import EngineId

Policy = Literal["pack", "spread", "strict-spread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    bundle: Resources
    num_bundles: int
    tp_size: int = 1
    """Bundles of one stage, whose workers communicate in every layer: on one node where possible."""
    strategy: str = "PACK"
    """Value of `ray_placement_strategy`: how the bundles of one engine are spread over nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReservation:
    """Bundles that one engine has taken, or is about to take."""

    nodes: Sequence[str]
    """[num_bundles] node of each"""
    group_id: str | None = None
    """Placement group of the engine; None while that is not created yet."""


def takes_bundles(config: Config) -> bool:
    """Whether engines or workers are Ray actors, which take bundles. `config`: with an executor other than `auto`."""
    return config.execution.executor in ("ray", "ray-graph") or config.parallel.data_parallel_backend == "ray"


def engine_size(config: Config, offered: Iterable[Resources]) -> EngineSize:
    """Return what one engine takes. `offered`: all resources of each node.

    If the workers are Ray actors, each has a bundle, and the engine beside them takes nothing. Otherwise the engine's
    actor takes, in one bundle, what all of its workers need.
    """
    worker = worker_resources(config.ray.ray_worker_resources, config.execution.device, offered)
    world_size = config.parallel.world_size
    if executor_name(config, in_placement_group=True) in ("ray", "ray-graph"):
        return EngineSize(
            bundle=worker,
            num_bundles=world_size,
            tp_size=config.parallel.tensor_parallel_size,
            strategy=config.ray.ray_placement_strategy,
        )
    return EngineSize(
        bundle={name: round_up_amount(amount * world_size) for name, amount in worker.items()}, num_bundles=1
    )


def place_engines(
    nodes: Sequence[Node],
    size: EngineSize,
    *,
    ranks: Iterable[int],
    running: Iterable[Collection[str]] = (),
    policy: Policy,
    preferred_node: str = "",
    begin_on_preferred: bool = False,
) -> dict[int, list[str]]:
    """Return the node of each bundle, for each of `ranks` in order. Ranks that do not fit now are left out.

    `running`: the nodes of each running engine of this instance; `preferred_node`: the node that comes first among
    equals, and with `begin_on_preferred` also before nodes with more room. An engine is on several nodes only if none
    has room for it, or if its strategy says so. Equal arguments give equal placements.
    """
    wanted = sorted(ranks)
    taken = [set(nodes) for nodes in running]
    order = sorted((node for node in nodes if node.is_alive), key=lambda n: (n.node_id != preferred_node, n.node_id))
    first = preferred_node if begin_on_preferred else None
    placed = _place(order, size, wanted, taken, policy, first)
    if policy == "spread" and len(placed) < len(wanted):  # spreading must not cost an engine
        placed = max(placed, _place(order, size, wanted, taken, "pack", first), key=len)
    return placed


def has_room_elsewhere(
    engine: EngineId,
    nodes: Sequence[Node],
    reservations: Mapping[EngineId, EngineReservation],
    size: EngineSize,
    *,
    policy: Policy,
) -> bool:
    """Whether `nodes`, which do not drain, have room for a running engine once it has left its place."""
    others = [reservation for other, reservation in reservations.items() if other != engine]
    left = Counter(reservations[engine].nodes)
    free = [
        replace(
            node,
            free={
                **node.free,
                **{
                    name: node.free.get(name, 0.0) + left[node.node_id] * amount for name, amount in size.bundle.items()
                },
            },
        )
        for node in subtract_reservations(nodes, others, size.bundle)
    ]
    running = [reservation.nodes for reservation in others]
    return bool(place_engines(free, size, ranks=[engine.rank], running=running, policy=policy))


def divide_bundles(
    bundles: Sequence[Bundle],
    *,
    worker: Resources,
    world_size: int,
    num_engines: int,
    tp_size: int = 1,
    preferred_node: str = "",
) -> list[list[int]]:
    """Divide the bundles of a placement group among engines, in order: for each engine the bundle of each worker.

    A bundle takes every worker that fits into it. An engine is on one node where possible, otherwise its stages of
    `tp_size` workers each are. Raises `ClusterError` if the group is too small.
    """
    order = in_rank_order(bundles, preferred_node)
    candidates = [bundle for bundle in order for _ in range(count_fitting(bundle.total, worker))]
    if len(candidates) < world_size * num_engines:
        fits = len(candidates) // world_size
        raise ClusterError(
            f"the placement group is too small: it has room for {fits} of {num_engines} engines, each of {world_size} "
            f"x {format_resources(worker)}; its bundles are {format_bundles(bundles) or 'none that may be used'}; "
            + (f"`data_parallel_size` {fits} would fit" if fits else "set `ray_worker_resources` to what they hold")
        )
    parts = []
    for _ in range(num_engines):
        on_node = Counter(bundle.node_id for bundle in candidates)
        on_one = [bundle for bundle in candidates if on_node[bundle.node_id] >= world_size]
        part = keep_stages_together(
            on_one or candidates, node_of=lambda bundle: bundle.node_id, stage_size=tp_size, count=world_size
        )
        for bundle in part:
            candidates.remove(bundle)
        parts.append([bundle.index for bundle in part])
    return parts


def subtract_reservations(
    nodes: Sequence[Node], reservations: Iterable[EngineReservation], bundle: Resources
) -> list[Node]:
    """Return the nodes without the reserved resources that the control store still shows as free.

    The control store shows a placement group on a node when that node has the resources that Ray makes of the group's
    bundles.
    """
    free = {node.node_id: dict(node.free) for node in nodes}
    for reservation in reservations:
        for index, node_id in enumerate(reservation.nodes):
            node = free.get(node_id, {})
            if reservation.group_id is None or f"bundle_group_{index}_{reservation.group_id}" not in node:
                for name, amount in bundle.items():
                    node[name] = node.get(name, 0.0) - amount
    return [replace(node, free=free[node.node_id]) for node in nodes]


def _place(
    nodes: Sequence[Node],
    size: EngineSize,
    ranks: Sequence[int],
    running: Sequence[Collection[str]],
    policy: Policy,
    first: str | None,
) -> dict[int, list[str]]:
    capacity = {node.node_id: max(0, count_fitting(node.free, size.bundle)) for node in nodes}
    engines = Counter(node for one in running for node in one)
    placed = {}
    for rank in ranks:
        if policy == "strict-spread":
            capacity = {node: count for node, count in capacity.items() if not engines[node]}
        load = dict.fromkeys(capacity, 0) if policy == "pack" else {node: engines[node] for node in capacity}
        chosen = _choose_nodes(capacity, load, size, first)
        if chosen is None:  # the next engine has the same size and does not fit either
            break
        placed[rank] = chosen
        for node in chosen:
            capacity[node] -= 1
        engines.update(set(chosen))
    return placed


def _choose_nodes(
    capacity: Mapping[str, int], load: Mapping[str, int], size: EngineSize, first: str | None
) -> list[str] | None:
    """Return the nodes of one engine's bundles, node by node; None if it does not fit.

    `capacity`: bundles that fit, in order of the nodes; `load`: among equal nodes the one with less comes first.
    """
    count = size.num_bundles
    order = sorted((node for node in capacity if capacity[node] > 0), key=lambda node: load[node])
    widest = sorted(order, key=lambda node: (node != first, load[node], -capacity[node]))
    single = next(([node] * count for node in order if capacity[node] >= count), None)
    match size.strategy:
        case "STRICT_PACK":
            return single
        case "STRICT_SPREAD":
            return widest[:count] if len(widest) >= count else None
        case "SPREAD":
            return _round_robin(order, capacity, count)
        case _:
            return single or _fill(widest, capacity, count, size.tp_size)


def _fill(order: Sequence[str], capacity: Mapping[str, int], count: int, stage_size: int) -> list[str] | None:
    candidates = [node for node in order for _ in range(capacity[node])]
    if len(candidates) < count:
        return None
    return keep_stages_together(candidates, node_of=lambda node: node, stage_size=stage_size, count=count)


def _round_robin(order: Sequence[str], capacity: Mapping[str, int], count: int) -> list[str] | None:
    rounds = max((capacity[node] for node in order), default=0)
    candidates = [node for turn in range(rounds) for node in order if capacity[node] > turn][:count]
    return sorted(candidates, key=order.index) if len(candidates) == count else None


def round_up_amount(amount: float) -> float:
    """Round up as Ray demands: a fraction of one, or a whole number."""
    return amount if amount <= 1 else float(math.ceil(round(amount, 4)))
