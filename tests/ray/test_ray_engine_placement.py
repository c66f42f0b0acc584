"""Placement of engines that are actors, on a cluster that changes meanwhile. No actor is created here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import ray_cluster
from ray.util.placement_group import placement_group_table
from ray_cluster import ACC, AddNode, MakeGroup, config, new_engine, wait_until

from eagleray.cluster import placement
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.nodes import Node, address_of, list_nodes
from eagleray.cluster.placement import DedicatedGroups, EnginePlacement
from eagleray.config.sections import Config
from eagleray.errors import ClusterError
from eagleray.identity import EngineId

SECONDS = 20.0


class Search:
    """Searches for the placements of the engines of one instance, each in a thread."""

    def __init__(self, config: Config, stack: ExitStack) -> None:
        self._groups = DedicatedGroups(config, preferred_node=ray_cluster.here())
        self._stack = stack
        self.found: dict[int, EnginePlacement] = {}
        self.errors: dict[int, Exception] = {}
        self._threads: list[threading.Thread] = []
        self._instance = new_engine().instance

    def begin(self, *ranks: int, seconds: float = SECONDS) -> None:
        engines = [EngineId(self._instance, rank) for rank in ranks]
        for engine in engines:
            self._groups.expect(engine)
        threads = [threading.Thread(target=self._find, args=(engine, seconds)) for engine in reversed(engines)]
        for thread in threads:
            thread.start()
        self._threads += threads

    def ips(self, *ranks: int) -> list[str]:
        for thread in self._threads:
            thread.join(SECONDS)
        assert not self.errors
        return [address_of(self.found[rank].bundles[0].node_id) for rank in ranks]

    def _find(self, engine: EngineId, seconds: float) -> None:
        try:
            found = self._groups.find(engine, Deadline(seconds, "ray_placement_timeout"))
        except Exception as error:
            self.errors[engine.rank] = error
        else:
            self._stack.callback(found.close)
            self.found[engine.rank] = found

    def join(self) -> None:
        for thread in self._threads:
            thread.join(SECONDS)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pending() -> list[str]:
    return [entry["name"] for entry in placement_group_table().values() if entry["state"] == "PENDING"]


def test_dedicated_groups_engines_expected_together_are_placed_in_order_of_rank(stack: ExitStack) -> None:
    head = ray_cluster.node_ips()[ray_cluster.here()]
    search = Search(config(), stack)
    search.begin(0, 1, 2, 3)
    found = search.ips(0, 1, 2, 3)
    assert found[:2] == [head, head]
    assert head not in found[2:]


def test_dedicated_groups_closed_placement_is_used_again(stack: ExitStack) -> None:
    search = Search(config(resources={"far": 2.0}), stack)
    search.begin(0, 1)
    (first, _) = search.ips(0, 1)
    search.begin(2)
    search.found[0].close()
    assert search.ips(2) == [first]


def test_dedicated_groups_growing_cluster_is_asked_for_what_is_missing(
    stack: ExitStack, add_node: AddNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "can_grow", lambda nodes: True)
    search = Search(config(resources={"new": 1.0}), stack)
    search.begin(0)
    assert wait_until(lambda: any(name.endswith("/engine-0") for name in pending()), SECONDS)
    add_node(resources={"new": 1}, node_ip_address="127.0.0.9")
    assert search.ips(0) == ["127.0.0.9"]
    search.found[0].close()


def test_dedicated_groups_node_that_another_program_took_is_given_up(
    stack: ExitStack, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = make_group(*[ACC] * 7)
    looks: list[bool] = []

    def stale_snapshot() -> list[Node]:  # the control store lags behind by some 100 ms
        looks.append(True)
        return [replace(node, free=node.total) if len(looks) == 1 else node for node in list_nodes()]

    monkeypatch.setattr(placement, "list_nodes", stale_snapshot)
    monkeypatch.setattr(placement, "PINNED_PLACEMENT_SECONDS", 0.2)
    search = Search(config(), stack)
    search.begin(0)
    assert wait_until(lambda: bool(pending()), SECONDS), "the search insists on the node for a moment"
    assert wait_until(lambda: not pending(), SECONDS)
    ray_cluster.remove(held)
    assert search.ips(0)


def test_dedicated_groups_search_that_times_out_leaves_nothing(stack: ExitStack, make_group: MakeGroup) -> None:
    make_group(*[ACC] * 7)
    search = Search(config(), stack)
    search.begin(0, seconds=0.2)
    search.join()
    assert isinstance(search.errors[0], ClusterError)
    assert "others hold a part of it" in str(search.errors[0])
    assert search._groups._reservations == search._groups._expected == {}
