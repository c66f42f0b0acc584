"""Bundles of engines that are added, and of engines whose nodes drain, without a cluster."""

from __future__ import annotations

import math
from typing import Any

import pytest

from eagleray.cluster import placement
from eagleray.cluster.bundles import Bundle
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.nodes import Node
from eagleray.cluster.placement import DedicatedGroups, UserGroup
from eagleray.config.build import build_config
from eagleray.config.sections import Config
from eagleray.errors import ClusterError
from eagleray.identity import EngineId

E = [EngineId("i", rank) for rank in range(5)]


def config(**options: Any) -> Config:
    return build_config(
        data_parallel_backend="ray", executor="ray", ray_worker_resources={"acc": 1}, device="cpu", **options
    )


def node(name: str, free: float, *, total: float = 2.0, drains: float | None = None) -> Node:
    ip = f"10.0.0.{ord(name) - ord('a') + 1}"
    resources = {"total": {"acc": total}, "free": {"acc": free}}
    return Node(node_id=name * 8, ip=ip, is_alive=True, drain_deadline=drains, **resources)


def user_group(monkeypatch: pytest.MonkeyPatch, nodes: list[Node], bundles: str, **options: Any) -> UserGroup:
    """Return a group with a bundle for each letter, on the node of that name."""
    found = [Bundle(index=i, node_id=name * 8, total={"acc": 1.0}, free={"acc": 0.0}) for i, name in enumerate(bundles)]
    monkeypatch.setattr(placement, "_wait_for_bundles", lambda *args: found)
    monkeypatch.setattr(placement, "list_nodes", lambda: nodes)
    return UserGroup(config(**options), "g", preferred_node="")


def indices(group: UserGroup, engine: EngineId, num_engines: int) -> list[int]:
    group.expect(engine, num_engines)
    return [bundle.index for bundle in group.find(engine, Deadline(0.0, "ray_placement_timeout")).bundles]


def test_user_group_engine_that_is_added_gets_the_bundles_of_its_rank(monkeypatch):
    group = user_group(monkeypatch, [node("a", 0), node("b", 0)], "aabb")
    assert [indices(group, E[rank], 1 + rank) for rank in range(4)] == [[0], [1], [2], [3]]
    assert indices(group, E[3], 2) == [3], "engines 0 and 1 have left"
    with pytest.raises(ClusterError, match="it has room for 4 of 5 engines"):
        indices(group, E[4], 5)


def test_user_group_with_bundle_indices_has_no_room_for_an_engine_that_is_added(monkeypatch):
    group = user_group(monkeypatch, [node("a", 0)], "aa", bundle_indices=[1], placement_group="g")
    assert indices(group, E[0], 1) == [1]
    with pytest.raises(ClusterError, match="`bundle_indices` names the bundles of one engine"):
        indices(group, E[1], 2)


def test_user_group_engine_waits_while_its_node_drains(monkeypatch):
    group = user_group(monkeypatch, [node("a", 0), node("b", 0, drains=math.inf)], "ab")
    assert indices(group, E[0], 2) == [0]
    with pytest.raises(ClusterError, match=r"on node 10\.0\.0\.2 \(bbbbbbbb\), which drains"):
        indices(group, E[1], 2)


def running(*places: str, **options: Any) -> DedicatedGroups:
    """Return groups of engines, each with its bundles on the nodes of these letters."""
    groups = DedicatedGroups(config(pipeline_parallel_size=len(places[0]), **options), preferred_node="")
    for engine, nodes in zip(E, places, strict=False):
        groups._reserve(engine, [name * 8 for name in nodes], f"group-{engine.rank}")
    return groups


def visible(nodes: list[Node], groups: DedicatedGroups) -> list[Node]:
    """Return the nodes as the control store shows them when the groups are there."""
    for one in groups._reservations.values():
        for index, node_id in enumerate(one.nodes):
            (found,) = [node for node in nodes if node.node_id == node_id]
            found.free[f"bundle_group_{index}_{one.group_id}"] = 1000.0
    return nodes


@pytest.mark.parametrize(
    ("places", "nodes", "options", "found"),
    [
        ("ab", [node("a", 1), node("b", 1)], {}, []),
        ("bab", [node("a", 1), node("b", 0, drains=9.0)], {}, [(0, True), (2, True)]),
        ("bab", [node("a", 0), node("b", 0, drains=9.0)], {}, [(0, False), (2, False)]),
        ("abc", [node("a", 1, drains=math.inf), node("b", 1, drains=9.0), node("c", 1)], {}, [(1, True), (0, True)]),
        ("ab", [node("a", 1), node("b", 1, drains=9.0)], {"ray_engine_placement": "strict-spread"}, [(1, False)]),
        ("ab", [node("a", 1), node("b", 1, drains=9.0), node("c", 1)], {"ray_nodes": ["10.0.0.2"]}, [(1, False)]),
    ],
)
def test_draining_engines_are_listed_with_the_room_that_other_nodes_have(places, nodes, options, found):
    groups = running(*places, **options)
    listed = groups.draining_engines(visible(nodes, groups))
    assert [(one.engine.rank, one.has_room) for one in listed] == found


def test_draining_engines_bundles_on_the_nodes_that_stay_are_free_when_the_engine_has_left():
    groups = running("ab")
    (one,) = groups.draining_engines(visible([node("a", 1), node("b", 1, drains=9.0)], groups))
    assert (one.has_room, one.node.ip) == (True, "10.0.0.2")
    (one,) = groups.draining_engines(visible([node("a", 0), node("b", 1, drains=9.0)], groups))
    assert not one.has_room


def test_explain_names_the_target_and_the_nodes_that_drain():
    groups = DedicatedGroups(config(data_parallel_size=1), preferred_node="")
    groups.expect(E[2], 3)
    text = groups._explain([node("a", 2), node("b", 2, drains=9.0)]).text
    assert text.startswith("the cluster cannot hold 3 engines of {acc: 1}: node 10.0.0.1 ")
    assert "`data_parallel_size` 2 would fit; not used because they drain: 10.0.0.2 (bbbbbbbb)" in text
