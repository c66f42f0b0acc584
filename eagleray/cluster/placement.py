"""Where the workers of an engine go: into a placement group that is given, or into one of the engine's own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from eagleray.cluster import groups
from eagleray.cluster.autoscaler import can_grow
from eagleray.cluster.bundles import Bundle, BundlesBusy, Resources, assign, take, worker_resources
from eagleray.cluster.nodes import Node, only, snapshot
from eagleray.cluster.shortage import explain, room
from eagleray.cluster.waiting import Wait
from eagleray.config import Config
from eagleray.errors import ClusterError, ConfigError
from eagleray.identity import EngineId, cluster_name

__all__ = ["Placement", "place"]

NEAR_SECONDS = 3.0
"""How long to insist that the engine's own node takes all workers, when it seems to have room for them."""


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
) -> Placement:
    """Wait for room for the workers of `engine` and assign it. `current_group`: the one that the program runs in;
    `current_bundles`: those of it that are this engine's, by rank, if that was decided already.

    Raises `ConfigError` or `ClusterError` at once for what no waiting would help, and after `ray_placement_timeout`
    for the rest.
    """
    wait = Wait(config.ray.ray_placement_timeout, "ray_placement_timeout")
    given = config.ray.placement_group or current_group
    if given is not None:
        return _place_in_given(groups.find(given), config, engine_node, current_bundles, wait)
    if config.ray.bundle_indices:
        raise ConfigError("option `bundle_indices` names bundles of a placement group: give one by `placement_group`")
    with ExitStack() as ends:
        group_id, worker = _open_own(engine, config, engine_node, wait, ends)
        bundles = _as_new(groups.bundles_of(group_id, []))
        chosen = assign(bundles, worker=worker, world_size=config.parallel.world_size, engine_node=engine_node)
        return Placement(group_id, worker, chosen, ends.pop_all())


def _place_in_given(group_id: str, config: Config, engine_node: str, mine: Sequence[int], wait: Wait) -> Placement:
    while not groups.is_ready(group_id):
        wait.again(lambda: f"placement group {group_id} is not ready ({groups.pending_reason(group_id)})")
    while True:
        nodes = snapshot()
        allowed = {node.node_id for node in only(nodes, config.ray.ray_nodes)}
        bundles = [bundle for bundle in groups.bundles_of(group_id, nodes) if bundle.node_id in allowed]
        worker = worker_resources(
            config.ray.ray_worker_resources, config.execution.device, [bundle.total for bundle in bundles]
        )
        try:
            chosen = (
                take(bundles, mine, worker=worker)
                if mine
                else assign(
                    bundles,
                    worker=worker,
                    world_size=config.parallel.world_size,
                    engine_node=engine_node,
                    indices=config.ray.bundle_indices,
                )
            )
        except BundlesBusy as busy:  # by an engine that has just ended, perhaps
            wait.again(partial(str, busy))
        else:
            return Placement(group_id, worker, chosen, ExitStack())


def _open_own(
    engine: EngineId, config: Config, engine_node: str, wait: Wait, ends: ExitStack
) -> tuple[str, dict[str, float]]:
    """A new group that is ready, and what a worker takes of it; `ends` removes it.

    On the engine's own node, if that has room and the strategy allows it; else where Ray finds room.
    """
    nodes = only(snapshot(), config.ray.ray_nodes)
    strategy, world_size = config.ray.ray_placement_strategy, config.parallel.world_size
    totals = [node.total for node in nodes if node.is_alive]
    worker = worker_resources(config.ray.ray_worker_resources, config.execution.device, totals)
    grows = not config.ray.ray_nodes and can_grow(nodes)  # by other nodes than those that were named
    if room(nodes, worker, strategy) < world_size and not grows:
        raise ClusterError(_shortage(nodes, worker, config))
    name = cluster_name(engine.instance, engine.label)

    near = [node for node in nodes if node.node_id == engine_node]
    if strategy in ("PACK", "STRICT_PACK") and room(near, worker, strategy, free=True) >= world_size:
        group_id = groups.create(name, worker, world_size, strategy, on=[[engine_node]] * world_size)
        with ExitStack() as undo:
            undo.callback(groups.remove, group_id)
            if groups.wait_until_ready(group_id, min(NEAR_SECONDS, wait.left)):
                ends.push(undo.pop_all())
                return group_id, worker

    on = [[node.node_id for node in nodes if node.is_alive]] * world_size if config.ray.ray_nodes else None
    group_id = groups.create(name, worker, world_size, strategy, on=on)
    ends.callback(groups.remove, group_id)
    while not groups.is_ready(group_id):
        wait.again(lambda: _shortage(only(snapshot(), config.ray.ray_nodes), worker, config))
    return group_id, worker


def _as_new(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Nobody else is in a new group: all of it is free, which the control store may not have heard yet."""
    return [Bundle(index=b.index, node_id=b.node_id, total=b.total, free=b.total) for b in bundles]


def _shortage(nodes: Sequence[Node], worker: Resources, config: Config) -> str:
    return explain(
        nodes,
        worker,
        config.ray.ray_placement_strategy,
        tensor=config.parallel.tensor_parallel_size,
        pipeline=config.parallel.pipeline_parallel_size,
    )
