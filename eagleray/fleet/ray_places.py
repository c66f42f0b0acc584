"""Where on the cluster an engine's actor goes, and its workers: in a placement group of its own, or in its share of one
that was given.

Used by the threads of several engines at once; see `ray_life`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from eagleray.cluster import placement_groups
from eagleray.cluster.autoscaler import can_grow
from eagleray.cluster.bundles import Bundle, assign
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.engine_placement import (
    EngineSize,
    Reservation,
    divide_bundles,
    engine_size,
    free_of_holds,
    place_engines,
)
from eagleray.cluster.nodes import Node, only, snapshot
from eagleray.cluster.placement import ready_bundles
from eagleray.config.resolve import local_ranks
from eagleray.config.sections import Config
from eagleray.errors import ClusterError, ClusterLost
from eagleray.fleet.room import CapacityShortage, explain_engine_shortage
from eagleray.identity import EngineId, cluster_name

PINNED_PLACEMENT_SECONDS = 3.0
"""How long to insist on nodes that seemed to have room: somebody else may have been faster."""


@dataclass(frozen=True)
class EnginePlacement:
    """Bundles of a placement group that is ready. Whoever holds it closes it."""

    group_id: str
    bundles: Sequence[int]
    """[num_bundles, or num_workers of a group that was given] by rank of the worker"""
    home: Bundle
    """The bundle of the engine's actor: that of its first worker."""
    address: str
    """Of the node of `home`."""
    size: EngineSize
    _ends: ExitStack

    def close(self) -> None:
        """Remove the group if it is the engine's own. Harmless when repeated."""
        self._ends.close()


class EnginePlacer(Protocol):
    def expect(self, engine: EngineId) -> None:
        """`find` is about to be called for it."""

    def find(self, engine: EngineId, wait: Deadline) -> EnginePlacement:
        """Wait for room. Raises `ClusterError` with what there is, at once where no waiting would help; `ClusterLost`
        if there was room before."""


class DedicatedGroups:
    """A placement group for each engine, pinned to the nodes that the plan says."""

    def __init__(self, config: Config, *, near: str) -> None:
        """`near`: this node."""
        self._config = config
        self._near = near
        self._lock = threading.Lock()
        self._expected: dict[int, EngineId] = {}
        self._holds: dict[EngineId, Reservation] = {}
        self._fitted: set[int] = set()
        """Ranks that the cluster had room for: when it has none any longer, it has lost a node."""

    def expect(self, engine: EngineId) -> None:
        with self._lock:
            self._expected[engine.rank] = engine

    def find(self, engine: EngineId, wait: Deadline) -> EnginePlacement:
        with ExitStack() as ends:
            ends.callback(self._forget, engine)
            while True:
                size, nodes = self._reserve(engine, wait)
                with ExitStack() as undo:
                    group_id = self._create(engine, size, nodes)
                    undo.callback(placement_groups.remove, group_id)
                    if self._becomes_ready(group_id, is_pinned=nodes is not None, wait=wait):
                        there = snapshot()
                        bundles = placement_groups.bundles_of(group_id, there)
                        if placement_groups.are_on_living_nodes(bundles, there):
                            ends.push(undo.pop_all())
                            self._hold(engine, [bundle.node_id for bundle in bundles], group_id)
                            address = _address(there, bundles[0])
                            return EnginePlacement(
                                group_id, range(size.num_bundles), bundles[0], address, size, ends.pop_all()
                            )
                self._release(engine)  # somebody else was faster, or a node is gone

    def _reserve(self, engine: EngineId, wait: Deadline) -> tuple[EngineSize, list[str] | None]:
        """The node of each bundle, which nobody else of this instance is given now. None: of a cluster that grows."""
        while True:
            nodes = snapshot()
            usable = only(nodes, self._config.ray.ray_nodes)
            size = engine_size(self._config, [node.total for node in usable if node.is_alive])
            with self._lock:
                if engine not in self._holds:
                    self._hold_for_all(usable, size)
                if hold := self._holds.get(engine):
                    return size, list(hold.nodes)
            shortage = self._explain(usable, size)
            grows = False if self._config.ray.ray_nodes else can_grow(nodes)
            if grows:
                return size, None
            if grows is not None and not shortage.may_pass:
                raise (ClusterLost if engine.rank in self._fitted else ClusterError)(shortage.text)
            wait.again(partial(str, shortage.text))

    def _hold_for_all(self, nodes: Sequence[Node], size: EngineSize) -> None:
        """For every engine that is expected and finds room: those that are born together are planned together."""
        waiting = {rank: engine for rank, engine in self._expected.items() if engine not in self._holds}
        found = place_engines(
            free_of_holds(nodes, self._holds.values(), size.bundle),
            size,
            ranks=waiting,
            running=[hold.nodes for hold in self._holds.values()],
            policy=self._config.ray.ray_engine_placement,
            near=self._near,
        )
        for rank, chosen in found.items():
            self._holds[waiting[rank]] = Reservation(nodes=chosen)
            self._fitted.add(rank)

    def _create(self, engine: EngineId, size: EngineSize, nodes: list[str] | None) -> str:
        """Ray is asked for what it may not have yet, too: that is how an autoscaler hears of it."""
        name = cluster_name(engine.instance, engine.label)
        if nodes is None:
            return placement_groups.create(name, size.bundle, size.num_bundles, size.strategy)
        on = [[node] for node in nodes]
        group_id = placement_groups.create(name, size.bundle, size.num_bundles, "PACK", on=on)
        self._hold(engine, nodes, group_id)
        return group_id

    def _becomes_ready(self, group_id: str, *, is_pinned: bool, wait: Deadline) -> bool:
        deadline = time.monotonic() + PINNED_PLACEMENT_SECONDS
        while not placement_groups.is_ready(group_id):
            if is_pinned and time.monotonic() >= deadline:
                return False
            wait.again(lambda: self._missing(group_id))
        return True

    def _missing(self, group_id: str) -> str:
        nodes = only(snapshot(), self._config.ray.ray_nodes)
        size = engine_size(self._config, [node.total for node in nodes if node.is_alive])
        reason = placement_groups.pending_reason(group_id)
        return f"the placement group is not ready ({reason}): {self._explain(nodes, size).text}"

    def _hold(self, engine: EngineId, nodes: Sequence[str], group_id: str) -> None:
        with self._lock:
            self._holds[engine] = Reservation(nodes=nodes, group_id=group_id)

    def _release(self, engine: EngineId) -> None:
        with self._lock:
            self._holds.pop(engine, None)

    def _forget(self, engine: EngineId) -> None:
        self._release(engine)
        with self._lock:
            if self._expected.get(engine.rank) == engine:
                del self._expected[engine.rank]

    def _explain(self, nodes: Sequence[Node], size: EngineSize) -> CapacityShortage:
        parallel = self._config.parallel
        return explain_engine_shortage(
            nodes,
            size,
            num_engines=len(local_ranks(self._config)),
            policy=self._config.ray.ray_engine_placement,
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
        )


class UserGroup:
    """A placement group of the user's, whose bundles are divided among the engines in order of their ranks."""

    def __init__(self, config: Config, group_id: str, *, near: str) -> None:
        self._config = config
        self._group_id = group_id
        self._near = near

    def expect(self, engine: EngineId) -> None:
        """Its bundles are known already."""

    def find(self, engine: EngineId, wait: Deadline) -> EnginePlacement:
        group_id = self._group_id
        nodes, bundles = ready_bundles(group_id, wait)
        allowed = {node.node_id for node in only(nodes, self._config.ray.ray_nodes)}
        bundles = [bundle for bundle in bundles if bundle.node_id in allowed]
        size = engine_size(self._config, [bundle.total for bundle in bundles])
        mine = self._share(bundles, size, engine.rank)
        home = next(bundle for bundle in bundles if bundle.index == mine[0])
        return EnginePlacement(group_id, mine, home, _address(nodes, home), size, ExitStack())

    def _share(self, bundles: Sequence[Bundle], size: EngineSize, rank: int) -> list[int]:
        if indices := self._config.ray.bundle_indices:
            empty = [replace(bundle, free=bundle.total) for bundle in bundles]
            exact = assign(empty, worker=size.bundle, world_size=size.num_bundles, engine_node="", indices=indices)
            return [bundle.index for bundle in exact]
        ranks = local_ranks(self._config)
        shares = divide_bundles(
            bundles,
            worker=size.bundle,
            world_size=size.num_bundles,
            num_engines=len(ranks),
            tensor=size.tensor,
            near=self._near,
        )
        return shares[ranks.index(rank)]


def _address(nodes: Sequence[Node], bundle: Bundle) -> str:
    return next(node.ip for node in nodes if node.node_id == bundle.node_id)
