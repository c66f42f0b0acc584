"""Where the workers of an engine go: into a placement group that is given, or into one of the engine's own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from eagleray.cluster import placement_groups
from eagleray.cluster.autoscaler import can_grow
from eagleray.cluster.bundles import (
    Bundle,
    BundlesBusy,
    Choose,
    Resources,
    assign,
    check_caller_leaves_room,
    fitting,
    keep_together,
    take,
    worker_resources,
)
from eagleray.cluster.capacity import explain_shortage, worker_capacity
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.nodes import Node, only, snapshot
from eagleray.config.sections import Config
from eagleray.errors import ClusterError, ClusterLost, ConfigError
from eagleray.identity import EngineId, cluster_name
from eagleray.messages.workers import RayCaller

PINNED_PLACEMENT_SECONDS = 3.0
"""How long to insist on the nodes that seem to have room for the workers: somebody else may have been faster."""


@dataclass(frozen=True)
class Placement:
    """The bundle of every worker. Whoever holds it closes it."""

    group_id: str
    worker: Resources
    """What each worker takes of its bundle."""
    bundles: Sequence[Bundle]
    """[world_size] by rank"""
    _ends: ExitStack

    def close(self) -> None:
        """Remove the placement group if it is the engine's own; one that was given stays."""
        self._ends.close()


def place(
    engine: EngineId,
    config: Config,
    *,
    engine_node: str,
    current_group: str | None,
    current_bundles: Sequence[int] = (),
    caller: RayCaller | None = None,
) -> Placement:
    """Wait for room for the workers of `engine` and assign it. `current_group`: the one that the program runs in;
    `current_bundles`: those of it that are this engine's, by rank, if that was decided already; `caller`: what the
    program is in it.

    Raises `ConfigError` or `ClusterError` at once for what no waiting would help, and after `ray_placement_timeout`
    for the rest; `ClusterLost` if `current_bundles` were lost with their node.
    """
    wait = Deadline(config.ray.ray_placement_timeout, "ray_placement_timeout")
    given = config.ray.placement_group or current_group
    if given is not None:
        group_id = placement_groups.find(given)
        caller = caller if group_id == current_group else None
        return _place_in_given(group_id, config, engine_node, current_bundles, caller, wait)
    if config.ray.bundle_indices:
        raise ConfigError("option `bundle_indices` names bundles of a placement group: give one by `placement_group`")
    with ExitStack() as ends:
        group_id, worker = _open_own(engine, config, engine_node, wait, ends)
        bundles = _as_new(placement_groups.bundles_of(group_id, []))
        chosen = assign(
            bundles,
            worker=worker,
            world_size=config.parallel.world_size,
            engine_node=engine_node,
            tensor=config.parallel.tensor_parallel_size,
        )
        return Placement(group_id, worker, chosen, ends.pop_all())


def _place_in_given(
    group_id: str, config: Config, engine_node: str, mine: Sequence[int], caller: RayCaller | None, wait: Deadline
) -> Placement:
    while True:
        nodes, bundles = ready_bundles(group_id, wait, mine=mine)
        allowed = {node.node_id for node in only(nodes, config.ray.ray_nodes)}
        bundles = [bundle for bundle in bundles if bundle.node_id in allowed]
        worker = worker_resources(
            config.ray.ray_worker_resources, config.execution.device, [bundle.total for bundle in bundles]
        )
        if mine:
            choose: Choose = partial(take, indices=mine, worker=worker)
        else:
            choose = partial(
                assign,
                worker=worker,
                world_size=config.parallel.world_size,
                engine_node=engine_node,
                tensor=config.parallel.tensor_parallel_size,
                indices=config.ray.bundle_indices,
            )
        try:
            chosen = choose(bundles)
        except BundlesBusy as busy:  # by an engine that has just ended, perhaps
            if caller is not None:
                check_caller_leaves_room(caller, bundles, choose, busy)
            wait.again(partial(str, busy))
        else:
            return Placement(group_id, worker, chosen, ExitStack())


def ready_bundles(group_id: str, wait: Deadline, *, mine: Sequence[int] = ()) -> tuple[list[Node], list[Bundle]]:
    """Wait until each bundle of a group is on a living node; return the nodes and the bundles.

    `mine`: the bundles that were chosen already, so that they were on nodes before. Those alone are looked at then, and
    `ClusterLost` is raised if one was lost with its node.
    """
    while True:
        nodes = snapshot()
        bundles = placement_groups.bundles_of(group_id, nodes) if mine or placement_groups.is_ready(group_id) else []
        if mine and not placement_groups.are_on_living_nodes([b for b in bundles if b.index in mine], nodes):
            raise ClusterLost(f"placement group {group_id} has lost a bundle with its node")
        if mine or (bundles and placement_groups.are_on_living_nodes(bundles, nodes)):
            return nodes, bundles
        wait.again(lambda: f"placement group {group_id} is not ready ({placement_groups.pending_reason(group_id)})")


def _open_own(
    engine: EngineId, config: Config, engine_node: str, wait: Deadline, ends: ExitStack
) -> tuple[str, dict[str, float]]:
    """A new group that is ready, and what a worker takes of it; `ends` removes it.

    On the engine's own node, if that has room and the strategy allows it; else on the nodes that keep the workers of
    a stage together, if there are some now; else where Ray finds room.
    """
    nodes = only(snapshot(), config.ray.ray_nodes)
    strategy, world_size = config.ray.ray_placement_strategy, config.parallel.world_size
    totals = [node.total for node in nodes if node.is_alive]
    worker = worker_resources(config.ray.ray_worker_resources, config.execution.device, totals)
    while worker_capacity(nodes, worker, strategy) < world_size:
        grows = False if config.ray.ray_nodes else can_grow(nodes)  # new nodes would not be among `ray_nodes`
        if grows:
            break
        shortage = _shortage(nodes, worker, config)
        if grows is not None:
            raise ClusterError(shortage)
        wait.again(partial(str, shortage))
        nodes = only(snapshot(), config.ray.ray_nodes)
    name = cluster_name(engine.instance, engine.label)

    pinned = _choose_nodes(nodes, worker, config, engine_node) if strategy in ("PACK", "STRICT_PACK") else None
    if pinned is not None:
        group_id = placement_groups.create(name, worker, world_size, strategy, on=[[node] for node in pinned])
        with ExitStack() as undo:
            undo.callback(placement_groups.remove, group_id)
            if placement_groups.wait_until_ready(group_id, min(PINNED_PLACEMENT_SECONDS, wait.left)):
                ends.push(undo.pop_all())
                return group_id, worker

    on = [[node.node_id for node in nodes if node.is_alive]] * world_size if config.ray.ray_nodes else None
    group_id = placement_groups.create(name, worker, world_size, strategy, on=on)
    ends.callback(placement_groups.remove, group_id)
    while not placement_groups.is_ready(group_id):
        wait.again(lambda: _shortage(only(snapshot(), config.ray.ray_nodes), worker, config))
    return group_id, worker


def _choose_nodes(nodes: Sequence[Node], worker: Resources, config: Config, engine_node: str) -> Sequence[str] | None:
    """The node of each worker, by rank: all on one if that has room now, the engine's own if it can be; else, if the
    strategy allows it, the workers of each stage on one. None: what is free now does not do."""
    parallel = config.parallel
    alive = sorted((node for node in nodes if node.is_alive), key=lambda node: node.node_id != engine_node)
    slots = [node.node_id for node in alive for _ in range(max(0, fitting(node.free, worker)))]
    whole = next((node for node in slots if slots.count(node) >= parallel.world_size), None)
    if whole is not None:
        return [whole] * parallel.world_size
    if config.ray.ray_placement_strategy == "STRICT_PACK" or len(slots) < parallel.world_size:
        return None
    return keep_together(
        slots, node_of=lambda node: node, group=parallel.tensor_parallel_size, count=parallel.world_size
    )


def _as_new(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Nobody else is in a new group: all of it is free, which the control store may not have heard yet."""
    return [Bundle(index=b.index, node_id=b.node_id, total=b.total, free=b.total) for b in bundles]


def _shortage(nodes: Sequence[Node], worker: Resources, config: Config) -> str:
    return explain_shortage(
        nodes,
        worker,
        config.ray.ray_placement_strategy,
        tensor=config.parallel.tensor_parallel_size,
        pipeline=config.parallel.pipeline_parallel_size,
    )
