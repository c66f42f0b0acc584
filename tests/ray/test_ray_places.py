"""How an engine that is an actor finds its place, on a cluster that changes meanwhile. No actor is made here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import ray_cluster
from ray.util.placement_group import placement_group_table
from ray_cluster import ACC, AddNode, MakeGroup, config, new_engine, wait_until

from eagleray.cluster.deadline import Deadline
from eagleray.cluster.nodes import Node, snapshot
from eagleray.config.sections import Config
from eagleray.errors import ClusterError
from eagleray.fleet import ray_places
from eagleray.fleet.ray_places import DedicatedGroups, EnginePlacement
from eagleray.identity import EngineId

SECONDS = 20.0


class Search:
    """Places of the engines of one instance, each searched for in a thread."""

    def __init__(self, config: Config, ends: ExitStack) -> None:
        self._places = DedicatedGroups(config, near=ray_cluster.here())
        self._ends = ends
        self.found: dict[int, EnginePlacement] = {}
        self.errors: dict[int, Exception] = {}
        self._threads: list[threading.Thread] = []
        self._instance = new_engine().instance

    def begin(self, *ranks: int, seconds: float = SECONDS) -> None:
        engines = [EngineId(self._instance, rank) for rank in ranks]
        for engine in engines:
            self._places.expect(engine)
        threads = [threading.Thread(target=self._find, args=(engine, seconds)) for engine in reversed(engines)]
        for thread in threads:
            thread.start()
        self._threads += threads

    def ips(self, *ranks: int) -> list[str]:
        for thread in self._threads:
            thread.join(SECONDS)
        assert not self.errors
        return [self.found[rank].address for rank in ranks]

    def _find(self, engine: EngineId, seconds: float) -> None:
        try:
            place = self._places.find(engine, Deadline(seconds, "ray_placement_timeout"))
        except Exception as error:
            self.errors[engine.rank] = error
        else:
            self._ends.callback(place.close)
            self.found[engine.rank] = place

    def join(self) -> None:
        for thread in self._threads:
            thread.join(SECONDS)


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pending() -> list[str]:
    return [entry["name"] for entry in placement_group_table().values() if entry["state"] == "PENDING"]


def test_those_that_are_born_together_are_placed_in_order_of_rank(ends: ExitStack) -> None:
    head = ray_cluster.node_ips()[ray_cluster.here()]
    search = Search(config(), ends)
    search.begin(0, 1, 2, 3)
    found = search.ips(0, 1, 2, 3)
    assert found[:2] == [head, head]
    assert head not in found[2:]


def test_a_place_that_was_given_back_is_taken_again(ends: ExitStack) -> None:
    search = Search(config(resources={"far": 2.0}), ends)
    search.begin(0, 1)
    (first, _) = search.ips(0, 1)
    search.begin(2)
    search.found[0].close()
    assert search.ips(2) == [first]


def test_a_cluster_that_grows_hears_what_is_missing(
    ends: ExitStack, add_node: AddNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_places, "can_grow", lambda nodes: True)
    search = Search(config(resources={"new": 1.0}), ends)
    search.begin(0)
    assert wait_until(lambda: any(name.endswith("/engine-0") for name in pending()), SECONDS)
    add_node(resources={"new": 1}, node_ip_address="127.0.0.9")
    assert search.ips(0) == ["127.0.0.9"]
    search.found[0].close()


def test_where_somebody_was_faster_the_search_goes_on(
    ends: ExitStack, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the control store says is some 100 ms old."""
    held = make_group(*[ACC] * 7)
    looks: list[bool] = []

    def old_news() -> list[Node]:
        looks.append(True)
        return [replace(node, free=node.total) if len(looks) == 1 else node for node in snapshot()]

    monkeypatch.setattr(ray_places, "snapshot", old_news)
    monkeypatch.setattr(ray_places, "PINNED_PLACEMENT_SECONDS", 0.2)
    search = Search(config(), ends)
    search.begin(0)
    assert wait_until(lambda: bool(pending()), SECONDS), "it insists on the node for a moment"
    assert wait_until(lambda: not pending(), SECONDS)
    ray_cluster.remove(held)
    assert search.ips(0)


def test_a_search_that_ends_leaves_nothing(ends: ExitStack, make_group: MakeGroup) -> None:
    make_group(*[ACC] * 7)
    search = Search(config(), ends)
    search.begin(0, seconds=0.2)
    search.join()
    assert isinstance(search.errors[0], ClusterError)
    assert "others hold a part of it" in str(search.errors[0])
    assert search._places._holds == search._places._expected == {}
