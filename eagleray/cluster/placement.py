"""Placement of engines and of their workers: in placement groups of their own, or in one that the user has given.

An engine that is a Ray actor finds its bundles through an `EnginePlacer`, shared by the threads of several engines.
An engine that runs already places its workers by `place_workers`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from eagleray.cluster import placement_groups
from eagleray.cluster.bundles import (
    Bundle,
    BundlesBusy,
    ChooseBundles,
    assign_bundles,
    bundles_at,
    check_caller_leaves_room,
    subtract_held,
)
from eagleray.cluster.capacity import CapacityShortage, explain_engine_shortage, explain_shortage
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.engine_placement import (
    EngineReservation,
    EngineSize,
    divide_bundles,
    engine_size,
    has_room_elsewhere,
    place_engines,
    subtract_reservations,
)
from eagleray.cluster.nodes import Node, can_grow, list_nodes, select_nodes
from eagleray.cluster.timeouts import PINNED_PLACEMENT_SECONDS
from eagleray.config.resolve import local_ranks
from eagleray.config.sections import Config
from eagleray.errors import ClusterError, ClusterLost, ConfigError
from eagleray.identity import EngineId, cluster_name
from eagleray.messages.workers import RayCaller, RayContext


@dataclass(frozen=True)
class EnginePlacement:
    """Bundles of a placement group that is ready. The owner closes it."""

    group_id: str
    size: EngineSize
    bundles: Sequence[Bundle]
    """[size.num_bundles] by rank of the worker; the engine's actor is in the first one"""
    _exit_stack: ExitStack

    def close(self) -> None:
        """Remove the placement group if it is the engine's own; one of the user stays. Idempotent."""
        self._exit_stack.close()


@dataclass(frozen=True)
class DrainingEngine:
    """An engine with bundles on a node that drains."""

    engine: EngineId
    node: Node
    """The first of its nodes to go."""
    has_room: bool
    """Whether the other nodes have room for the engine."""


def place_workers(engine: EngineId, config: Config, *, engine_node: str, context: RayContext | None) -> EnginePlacement:
    """Wait for room for the workers of a running engine and assign it.

    `context`: the program that asks for the engine, if it is in this cluster. Its placement group is used unless the
    user gives another one, and of it the bundles that were already chosen for this engine, if any.

    Raises `ConfigError` or `ClusterError` at once where waiting would not help, otherwise after
    `ray_placement_timeout`; `ClusterLost` if bundles that were already chosen were lost with their node.
    """
    deadline = Deadline(config.ray.ray_placement_timeout, "ray_placement_timeout")
    current = None if context is None else context.placement_group
    given = config.ray.placement_group or current
    if given is not None:
        group_id = placement_groups.find(given)
        caller = context.caller if context is not None and group_id == current else None
        chosen = () if context is None else context.bundles
        return _place_in_group(group_id, config, engine_node, chosen, caller, deadline)
    if config.ray.bundle_indices:
        raise ConfigError("option `bundle_indices` names bundles of a placement group: give one by `placement_group`")
    groups = DedicatedGroups(config, preferred_node=engine_node, are_for_workers=True)
    groups.expect(engine)
    with ExitStack() as undo:
        placement = groups.find(engine, deadline)
        undo.callback(placement.close)
        # The group is new, so all of it is free, though the control store may not show that yet.
        bundles = [replace(bundle, free=bundle.total) for bundle in placement.bundles]
        by_rank = _chooser(config, placement.size, engine_node)(bundles)
        undo.pop_all()
        return replace(placement, bundles=by_rank)


def _place_in_group(
    group_id: str,
    config: Config,
    engine_node: str,
    chosen: Sequence[int],
    caller: RayCaller | None,
    deadline: Deadline,
) -> EnginePlacement:
    while True:
        bundles = _wait_for_bundles(group_id, config, deadline, chosen=chosen)
        size = engine_size(config, [bundle.total for bundle in bundles])
        choose: ChooseBundles = _chooser(config, size, engine_node)
        if chosen:
            choose = partial(bundles_at, indices=chosen, worker=size.bundle)
        try:
            return EnginePlacement(group_id, size, choose(bundles), ExitStack())
        except BundlesBusy as busy:  # perhaps by an engine that has just exited
            if caller is not None:
                check_caller_leaves_room(caller, bundles, choose, busy)
            deadline.poll(partial(str, busy))


def _chooser(config: Config, size: EngineSize, engine_node: str) -> ChooseBundles:
    return partial(
        assign_bundles,
        worker=size.bundle,
        world_size=size.num_bundles,
        engine_node=engine_node,
        tp_size=size.tp_size,
        indices=config.ray.bundle_indices,
    )


def _wait_for_bundles(group_id: str, config: Config, deadline: Deadline, *, chosen: Sequence[int] = ()) -> list[Bundle]:
    """Wait until each bundle of a group is on a living node; return the bundles on nodes that may be used.

    `chosen`: bundles that were chosen already, so that they were on nodes before. Only those are checked then, and
    `ClusterLost` is raised if one was lost with its node.
    """
    while True:
        nodes = list_nodes()
        bundles = placement_groups.bundles_of(group_id, nodes) if chosen or placement_groups.is_ready(group_id) else []
        checked = [bundle for bundle in bundles if bundle.index in chosen] if chosen else bundles
        are_alive = placement_groups.are_on_living_nodes(checked, nodes)
        if chosen and not are_alive:
            raise ClusterLost(f"placement group {group_id} has lost a bundle with its node")
        if bundles and are_alive:
            usable = {node.node_id for node in select_nodes(nodes, config.ray.ray_nodes, with_draining=True)}
            return [bundle for bundle in bundles if bundle.node_id in usable]
        deadline.poll(lambda: f"placement group {group_id} is not ready ({placement_groups.pending_reason(group_id)})")


class UserGroup:
    """A placement group of the user, whose bundles are divided among the engines in order of their ranks.

    `caller`: the program that asks for the engines, if it runs in the group: what it holds itself is not divided.
    """

    def __init__(self, config: Config, group_id: str, *, preferred_node: str, caller: RayCaller | None = None) -> None:
        self._config = config
        self._group_id = group_id
        self._preferred_node = preferred_node
        self._held = {} if caller is None else caller.held
        self._num_engines = len(local_ranks(config))

    def expect(self, engine: EngineId, num_engines: int | None = None) -> None:
        """Announce that `find` is about to be called for `engine`, one of `num_engines`; None: of those configured."""
        self._num_engines = len(local_ranks(self._config)) if num_engines is None else num_engines

    def draining_engines(self, nodes: Sequence[Node]) -> list[DrainingEngine]:
        """Return no engine: Ray moves the bundles of a group itself, when their node has gone."""
        return []

    def find(self, engine: EngineId, deadline: Deadline) -> EnginePlacement:
        """Wait until the engine's bundles are on nodes that stay. Raises `ClusterError` if the group is too small."""
        while True:
            bundles = _wait_for_bundles(self._group_id, self._config, deadline)
            size = engine_size(self._config, [bundle.total for bundle in bundles])
            part = self._part_of(bundles, size, engine.rank)
            of_part = {bundle.node_id for bundle in part}
            draining = [node for node in list_nodes() if node.is_draining and node.node_id in of_part]
            if not draining:
                return EnginePlacement(self._group_id, size, part, ExitStack())
            deadline.poll(partial("bundles of the engine are on node {}, which drains".format, draining[0].label))

    def _part_of(self, bundles: Sequence[Bundle], size: EngineSize, rank: int) -> list[Bundle]:
        """Return the bundles of a rank: the same whatever other engines there are."""
        position = rank - local_ranks(self._config)[0]
        if self._config.ray.bundle_indices:
            if position > 0:
                raise ClusterError(
                    "option `bundle_indices` names the bundles of one engine, so there are none for another one: start "
                    "the instance without it to scale within the placement group"
                )
            return _chooser(self._config, size, "")([replace(bundle, free=bundle.total) for bundle in bundles])
        unheld = [
            replace(bundle, total=subtract_held(bundle.total, self._held.get(bundle.index, {}))) for bundle in bundles
        ]
        parts = divide_bundles(
            unheld,
            worker=size.bundle,
            world_size=size.num_bundles,
            num_engines=max(self._num_engines, position + 1),
            tp_size=size.tp_size,
            preferred_node=self._preferred_node,
        )
        by_index = {bundle.index: bundle for bundle in bundles}
        return [by_index[index] for index in parts[position]]


class DedicatedGroups:
    """A placement group for each engine, pinned to the nodes that `place_engines` chooses."""

    def __init__(self, config: Config, *, preferred_node: str, are_for_workers: bool = False) -> None:
        """`are_for_workers`: the groups hold only the workers of an engine, which itself runs on `preferred_node`."""
        self._config = config
        self._preferred_node = preferred_node
        self._are_for_workers = are_for_workers
        self._lock = threading.Lock()
        self._expected: dict[int, EngineId] = {}
        self._reservations: dict[EngineId, EngineReservation] = {}
        self._placed: set[int] = set()
        """Ranks that the cluster had room for: if it has none later, it has lost a node."""
        self._num_engines = len(local_ranks(config))

    def expect(self, engine: EngineId, num_engines: int | None = None) -> None:
        """Announce that `find` is about to be called for `engine`, one of `num_engines`; None: of those configured."""
        with self._lock:
            self._expected[engine.rank] = engine
            self._num_engines = len(local_ranks(self._config)) if num_engines is None else num_engines

    def draining_engines(self, nodes: Sequence[Node]) -> list[DrainingEngine]:
        """Return the engines with bundles on draining nodes, ordered by the deadlines of the nodes."""
        by_id = {node.node_id: node for node in nodes if node.is_draining}
        with self._lock:
            reservations = {engine: one for engine, one in self._reservations.items() if one.group_id is not None}
            on_draining = {e: [by_id[n] for n in one.nodes if n in by_id] for e, one in reservations.items()}
            if not any(on_draining.values()):
                return []
            usable = select_nodes(nodes, self._config.ray.ray_nodes)
            size = self._size(usable or nodes)
            policy = self._config.ray.ray_engine_placement
            found = [
                DrainingEngine(
                    engine=engine,
                    node=min(draining, key=_drain_deadline),
                    has_room=has_room_elsewhere(engine, usable, self._reservations, size, policy=policy),
                )
                for engine, draining in on_draining.items()
                if draining
            ]
        return sorted(found, key=lambda one: (_drain_deadline(one.node), one.engine.rank))

    def find(self, engine: EngineId, deadline: Deadline) -> EnginePlacement:
        """Wait for room. Raises `ClusterError` that names the nodes' resources, at once where waiting would not help;
        `ClusterLost` if there was room before."""
        with ExitStack() as stack:
            stack.callback(self._forget, engine)
            while True:
                size, nodes = self._wait_for_nodes(engine, deadline)
                with ExitStack() as undo:
                    group_id = self._create(engine, size, nodes)
                    undo.callback(placement_groups.remove, group_id)
                    if self._becomes_ready(group_id, deadline, is_pinned=nodes is not None):
                        existing = list_nodes()
                        bundles = placement_groups.bundles_of(group_id, existing)
                        if placement_groups.are_on_living_nodes(bundles, existing):
                            stack.push(undo.pop_all())
                            self._reserve(engine, [bundle.node_id for bundle in bundles], group_id)
                            return EnginePlacement(group_id, size, bundles, stack.pop_all())
                self._release(engine)  # another program was faster, or a node is gone

    def _wait_for_nodes(self, engine: EngineId, deadline: Deadline) -> tuple[EngineSize, list[str] | None]:
        """Reserve a node for each bundle and return them; None for the nodes if Ray has to add some to the cluster."""
        while True:
            nodes = list_nodes()
            usable = select_nodes(nodes, self._config.ray.ray_nodes)
            size = self._size(usable or nodes)
            with self._lock:
                if engine not in self._reservations:
                    self._reserve_for_expected(usable, size)
                if reservation := self._reservations.get(engine):
                    return size, list(reservation.nodes)
            shortage = self._explain(nodes)
            grows = False if self._config.ray.ray_nodes else can_grow(nodes)  # new nodes would not be among `ray_nodes`
            if grows:
                return size, None
            if grows is not None and not shortage.may_pass:
                raise (ClusterLost if engine.rank in self._placed else ClusterError)(shortage.text)
            deadline.poll(partial(str, shortage.text))

    def _reserve_for_expected(self, nodes: Sequence[Node], size: EngineSize) -> None:
        """Reserve nodes for every expected engine that fits: engines that start together are placed together."""
        waiting = {rank: engine for rank, engine in self._expected.items() if engine not in self._reservations}
        found = place_engines(
            subtract_reservations(nodes, self._reservations.values(), size.bundle),
            size,
            ranks=waiting,
            running=[reservation.nodes for reservation in self._reservations.values()],
            policy=self._config.ray.ray_engine_placement,
            preferred_node=self._preferred_node,
            begin_on_preferred=self._are_for_workers,
        )
        for rank, chosen in found.items():
            self._reservations[waiting[rank]] = EngineReservation(nodes=chosen)
            self._placed.add(rank)

    def _create(self, engine: EngineId, size: EngineSize, nodes: list[str] | None) -> str:
        name = cluster_name(engine.instance, engine.label)
        if nodes is None:  # a pending group is how an autoscaler learns what is missing
            return placement_groups.create(name, size.bundle, size.num_bundles, size.strategy)
        group_id = placement_groups.create(name, size.bundle, size.num_bundles, "PACK", nodes=nodes)
        self._reserve(engine, nodes, group_id)
        return group_id

    def _becomes_ready(self, group_id: str, deadline: Deadline, *, is_pinned: bool) -> bool:
        pinned_until = time.monotonic() + PINNED_PLACEMENT_SECONDS
        while not placement_groups.is_ready(group_id):
            if is_pinned and time.monotonic() >= pinned_until:
                return False
            deadline.poll(lambda: self._explain_pending(group_id))
        return True

    def _explain_pending(self, group_id: str) -> str:
        reason = placement_groups.pending_reason(group_id)
        return f"the placement group is not ready ({reason}): {self._explain(list_nodes()).text}"

    def _reserve(self, engine: EngineId, nodes: Sequence[str], group_id: str) -> None:
        with self._lock:
            self._reservations[engine] = EngineReservation(nodes=nodes, group_id=group_id)

    def _release(self, engine: EngineId) -> None:
        with self._lock:
            self._reservations.pop(engine, None)

    def _forget(self, engine: EngineId) -> None:
        self._release(engine)
        with self._lock:
            if self._expected.get(engine.rank) == engine:
                del self._expected[engine.rank]

    def _size(self, nodes: Sequence[Node]) -> EngineSize:
        return engine_size(self._config, [node.total for node in nodes if node.is_alive])

    def _explain(self, nodes: Sequence[Node]) -> CapacityShortage:
        usable = select_nodes(nodes, self._config.ray.ray_nodes)
        size = self._size(usable or nodes)
        tensor, pipeline = self._config.parallel.tensor_parallel_size, self._config.parallel.pipeline_parallel_size
        if self._are_for_workers:
            shortage = explain_shortage(usable, size, tensor=tensor, pipeline=pipeline)
        else:
            shortage = explain_engine_shortage(
                usable,
                size,
                num_engines=self._num_engines,
                policy=self._config.ray.ray_engine_placement,
                tensor=tensor,
                pipeline=pipeline,
            )
        draining = ", ".join(node.label for node in nodes if node.is_draining)
        note = f"; not used because they drain: {draining}" if draining else ""
        return replace(shortage, text=shortage.text + note)


def _drain_deadline(node: Node) -> float:
    return math.inf if node.drain_deadline is None else node.drain_deadline


EnginePlacer = DedicatedGroups | UserGroup
"""Finds the bundles of engines that are Ray actors."""
