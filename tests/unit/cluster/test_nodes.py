"""Names of nodes, and signs of an autoscaler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagleray.cluster import nodes
from eagleray.cluster.nodes import Node, check_cluster_can_hold, manages_nodes, select_nodes
from eagleray.errors import ClusterError


def node(name: str, *, is_alive: bool = True, hostname: str = "") -> Node:
    ip = f"10.0.0.{ord(name) - ord('a') + 1}"
    return Node(node_id=name * 8, ip=ip, hostname=hostname, is_alive=is_alive, total={}, free={})


NODES = [node("a", hostname="alpha"), node("b", hostname="beta"), node("c", is_alive=False)]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], "abc"),
        (["a" * 8], "a"),
        (["beta", "10.0.0.1"], "ab"),
        (["10.0.0.3"], "c"),  # it was there: no mistake, but no room either
    ],
)
def test_select_nodes_finds_by_id_host_name_or_address(names: list[str], found: str) -> None:
    assert "".join(one.node_id[0] for one in select_nodes(NODES, names)) == found


def test_select_nodes_finds_by_a_prefix_of_8_digits() -> None:
    long = [replace(NODES[0], node_id="0123456789abcdef")]
    assert select_nodes(long, ["0123456789"]) == long
    with pytest.raises(ClusterError):
        select_nodes(long, ["0123456"])


def test_select_nodes_leaves_out_nodes_that_drain_but_finds_their_names() -> None:
    nodes = [replace(NODES[0], drain_deadline=100.0), NODES[1], replace(NODES[2], drain_deadline=100.0)]
    assert select_nodes(nodes, []) == nodes[1:], "a dead one does not drain any longer"
    assert select_nodes(nodes, ["alpha"]) == []
    assert select_nodes(nodes, ["alpha"], with_draining=True) == nodes[:1]


def test_select_nodes_unknown_name_is_refused_with_the_known_nodes() -> None:
    with pytest.raises(ClusterError, match=r"no node is 'gamma'; .* of these: 10\.0\.0\.1 \(aaaaaaaa\) alpha, 10"):
        select_nodes(NODES, ["alpha", "gamma"])


WATCHES = {"active_nodes": {"node_a1": 1, "node_b2": 1}, "node_type_mapping": {"a1": "node_a1", "b2": "node_b2"}}


@pytest.mark.parametrize(
    ("report", "manages"),
    [
        ({}, False),
        (WATCHES, False),
        ({"active_nodes": {"ray.head.default": 1}, "node_type_mapping": {"10.0.0.1": "ray.head.default"}}, True),
        ({**WATCHES, "pending_nodes": [["10.0.0.9", "gpu", "waiting"]]}, True),
        ({**WATCHES, "pending_launches": {"gpu": 2}}, True),
    ],
)
def test_manages_nodes_autoscaler_that_only_watches_is_false(report: dict[str, object], manages: bool) -> None:
    assert manages_nodes(report) is manages


@pytest.mark.parametrize("grows", [True, False])
def test_check_cluster_can_hold_waits_until_it_is_known_whether_nodes_can_be_added(
    monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    answers = [None, None, grows]
    monkeypatch.setattr(nodes, "POLL_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(nodes, "list_nodes", lambda: NODES)
    monkeypatch.setattr(nodes, "can_grow", lambda nodes: answers.pop(0))
    if grows:
        check_cluster_can_hold(lambda nodes: "too few")
    else:
        with pytest.raises(ClusterError, match="too few"):
            check_cluster_can_hold(lambda nodes: "too few")
    assert answers == []


def test_check_cluster_can_hold_enough_nodes_are_accepted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "list_nodes", lambda: NODES)
    monkeypatch.delattr(nodes, "can_grow")
    check_cluster_can_hold(lambda nodes: None)
