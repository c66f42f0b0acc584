"""Where the engines of an instance go: nodes x sizes x engines that are there -> the node of each bundle. Pure.

All engines of an instance are of one size, so room is counted in bundles of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from eagleray.cluster.bundles import Bundle, Resources, fitting, in_rank_order, keep_together, show, worker_resources
from eagleray.cluster.nodes import Node
from eagleray.config.resolve import executor_name
from eagleray.config.sections import Config
from eagleray.errors import ClusterError

Policy = Literal["pack", "spread", "strict-spread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    bundle: Resources
    num_bundles: int
    tensor: int = 1
    """Bundles of one stage, whose workers talk in every layer: on one node where that is possible."""
    strategy: str = "PACK"
    """As `ray_placement_strategy`: how the bundles of one engine are spread over nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What one engine has taken."""

    nodes: Sequence[str]
    """[num_bundles]"""
    group_id: str | None = None
    """None: its placement group is about to be made."""


def engine_size(config: Config, offered: Iterable[Resources]) -> EngineSize:
    """What one engine takes. `offered`: what each node has in all.

    If the workers are Ray actors each has a bundle, and the engine beside them takes nothing. Else the engine's actor
    takes, in one bundle, what all of its workers need.
    """
    worker = worker_resources(config.ray.ray_worker_resources, config.execution.device, offered)
    world_size = config.parallel.world_size
    if executor_name(config, in_placement_group=True) in ("ray", "ray-graph"):
        return EngineSize(
            bundle=worker,
            num_bundles=world_size,
            tensor=config.parallel.tensor_parallel_size,
            strategy=config.ray.ray_placement_strategy,
        )
    return EngineSize(bundle={name: _whole(amount * world_size) for name, amount in worker.items()}, num_bundles=1)


def place_engines(
    nodes: Sequence[Node],
    size: EngineSize,
    *,
    ranks: Iterable[int],
    running: Iterable[Collection[str]] = (),
    policy: Policy,
    near: str = "",
) -> dict[int, list[str]]:
    """For each of `ranks`, in order, the node of each of its bundles. A rank that is not in it finds no room now.

    `running`: the nodes of each engine of this instance that has some; `near`: the node that comes first. An engine is
    on several nodes only if none has room for it, or if its strategy says so. Equal arguments give equal plans.
    """
    wanted = sorted(ranks)
    taken = [set(nodes) for nodes in running]
    plans = [_plan(nodes, size, wanted, taken, policy, near)]
    if policy == "spread" and len(plans[0]) < len(wanted):  # a wish: not at the price of an engine
        plans.append(_plan(nodes, size, wanted, taken, "pack", near))
    return max(plans, key=len)


def divide_bundles(
    bundles: Sequence[Bundle], *, worker: Resources, world_size: int, num_engines: int, tensor: int = 1, near: str = ""
) -> list[list[int]]:
    """The bundles of a placement group divided among engines, in order: for each engine the bundle of each worker.

    A bundle takes as many workers as fit into it. An engine is on one node where that is possible, else its stages of
    `tensor` workers each are. Raises `ClusterError` if the group is too small.
    """
    slots = [bundle for bundle in in_rank_order(bundles, near) for _ in range(fitting(bundle.total, worker))]
    if len(slots) < world_size * num_engines:
        held = ", ".join(f"{bundle.index}: {show(bundle.total)}" for bundle in sorted(bundles, key=lambda b: b.index))
        fits = len(slots) // world_size
        raise ClusterError(
            f"the placement group is too small: it has room for {fits} of {num_engines} engines, each of {world_size} "
            f"x {show(worker)}; its bundles are {held or 'none that may be used'}; "
            + (f"`data_parallel_size` {fits} would fit" if fits else "set `ray_worker_resources` to what they hold")
        )
    shares = []
    for _ in range(num_engines):
        room = Counter(bundle.node_id for bundle in slots)
        on_one = [bundle for bundle in slots if room[bundle.node_id] >= world_size]
        stages = keep_together(on_one or slots, node_of=lambda bundle: bundle.node_id, group=tensor, count=world_size)
        for bundle in stages:
            slots.remove(bundle)
        shares.append([bundle.index for bundle in stages])
    return shares


def free_of_holds(nodes: Sequence[Node], holds: Iterable[Reservation], bundle: Resources) -> list[Node]:
    """The nodes, less what the holds take of them and the control store has not heard of yet.

    It has heard of a placement group on a node when that node has the resources that Ray makes of its bundles.
    """
    free = {node.node_id: dict(node.free) for node in nodes}
    for hold in holds:
        for index, node_id in enumerate(hold.nodes):
            node = free.get(node_id, {})
            if hold.group_id is None or f"bundle_group_{index}_{hold.group_id}" not in node:
                for name, amount in bundle.items():
                    node[name] = node.get(name, 0.0) - amount
    return [replace(node, free=free[node.node_id]) for node in nodes]


def _plan(
    nodes: Sequence[Node],
    size: EngineSize,
    ranks: Sequence[int],
    running: Sequence[Collection[str]],
    policy: Policy,
    near: str,
) -> dict[int, list[str]]:
    order = sorted((node for node in nodes if node.is_alive), key=lambda node: (node.node_id != near, node.node_id))
    room = {node.node_id: max(0, fitting(node.free, size.bundle)) for node in order}
    engines = Counter(node for one in running for node in one)
    placed = {}
    for rank in ranks:
        if policy == "strict-spread":
            room = {node: count for node, count in room.items() if not engines[node]}
        load = dict.fromkeys(room, 0) if policy == "pack" else {node: engines[node] for node in room}
        chosen = _choose(room, load, size)
        if chosen is None:  # nor will the next one, which is of the same size
            break
        placed[rank] = chosen
        for node in chosen:
            room[node] -= 1
        engines.update(set(chosen))
    return placed


def _choose(room: Mapping[str, int], load: Mapping[str, int], size: EngineSize) -> list[str] | None:
    """The nodes of one engine's bundles, node by node. `room`: bundles that fit, in order of the nodes; `load`: of
    nodes that are equal otherwise the one with less comes first."""
    count = size.num_bundles
    order = sorted((node for node in room if room[node] > 0), key=lambda node: load[node])
    widest = sorted(order, key=lambda node: (load[node], -room[node]))
    single = next(([node] * count for node in order if room[node] >= count), None)
    match size.strategy:
        case "STRICT_PACK":
            return single
        case "STRICT_SPREAD":
            return widest[:count] if len(widest) >= count else None
        case "SPREAD":
            return _round_robin(order, room, count)
        case _:
            return single or _fill(widest, room, count, size.tensor)


def _fill(order: Sequence[str], room: Mapping[str, int], count: int, tensor: int) -> list[str] | None:
    slots = [node for node in order for _ in range(room[node])]
    if len(slots) < count:
        return None
    return keep_together(slots, node_of=lambda node: node, group=tensor, count=count)


def _round_robin(order: Sequence[str], room: Mapping[str, int], count: int) -> list[str] | None:
    rounds = max((room[node] for node in order), default=0)
    slots = [node for turn in range(rounds) for node in order if room[node] > turn][:count]
    return sorted(slots, key=order.index) if len(slots) == count else None


def _whole(amount: float) -> float:
    """As Ray wants it: a fraction of one, or a whole number."""
    return amount if amount <= 1 else float(math.ceil(round(amount, 4)))
