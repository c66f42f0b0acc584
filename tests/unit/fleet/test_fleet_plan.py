"""Where engines go, and what is said when they find no room."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.cluster.bundles import Bundle
from eagleray.cluster.engine_placement import (
    EngineSize,
    Reservation,
    divide_bundles,
    engine_size,
    free_of_holds,
    place_engines,
)
from eagleray.cluster.nodes import Node, only
from eagleray.config.build import build_config
from eagleray.errors import ClusterError
from eagleray.fleet.room import explain_engine_shortage

GPU = {"GPU": 1.0}
POLICIES = ("pack", "spread", "strict-spread")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def node(name: str, total: float, free: float | None = None, *, is_alive: bool = True, hostname: str = "") -> Node:
    return Node(
        node_id=name * 8,
        ip=f"10.0.0.{ord(name) - ord('a') + 1}",
        hostname=hostname,
        is_alive=is_alive,
        total={"GPU": total},
        free={"GPU": total if free is None else free},
    )


def size(num_bundles: int = 1, strategy: str = "PACK", amount: float = 1.0) -> EngineSize:
    return EngineSize(bundle={"GPU": amount}, num_bundles=num_bundles, strategy=strategy)


def places(nodes: list[Node], wanted: EngineSize, num_engines: int, **options) -> list[str]:
    """The nodes of each engine, as letters, in order of rank."""
    found = place_engines(nodes, wanted, ranks=range(num_engines), **{"policy": "pack", **options})
    assert list(found) == list(range(len(found)))
    return ["".join(node_id[0] for node_id in chosen) for chosen in found.values()]


def test_pack_fills_one_node_after_the_other() -> None:
    assert places([node("b", 2), node("a", 2), node("c", 2)], size(), 5) == ["a", "a", "b", "b", "c"]


def test_place_keeps_a_tensor_parallel_group_on_one_node_if_one_has_room() -> None:
    two_stages = replace(size(4), tensor=2)
    assert places([node("a", 3), node("b", 2)], two_stages, 1) == ["aabb"]
    assert places([node("a", 1), node("b", 5), node("c", 3)], replace(size(6), tensor=2), 1) == ["bbbbcc"]
    assert places([node("a", 1), node("b", 1), node("c", 2)], two_stages, 1) == ["ccab"]  # not possible for both


def test_spread_takes_the_node_with_the_fewest_engines() -> None:
    assert places([node("a", 4), node("b", 1), node("c", 2)], size(), 6, policy="spread") == list("abcaca")


def test_spread_counts_the_engines_that_are_there() -> None:
    running = [["a" * 8], ["a" * 8], ["b" * 8]]
    assert places([node("a", 4), node("b", 4)], size(), 2, policy="spread", running=running) == ["b", "a"]


def test_strict_spread_gives_no_node_two() -> None:
    nodes = [node("a", 4), node("b", 4), node("c", 4)]
    assert places(nodes, size(2), 4, policy="strict-spread") == ["aa", "bb", "cc"]
    assert places(nodes, size(2), 4, policy="strict-spread", running=[["b" * 8]]) == ["aa", "cc"]


def test_spread_is_a_wish() -> None:
    """Every engine needs a worker on a, the only node that has room for more than one."""
    nodes = [node("a", 3), node("b", 1), node("c", 1), node("d", 1)]
    found = places(nodes, size(2, "STRICT_SPREAD"), 3, policy="spread")
    assert sorted(found) == ["ab", "ac", "ad"]


def test_the_near_node_comes_first() -> None:
    assert places([node("a", 1), node("b", 1)], size(), 2, near="b" * 8) == ["b", "a"]


def test_an_engine_is_on_several_nodes_only_if_it_fits_on_none() -> None:
    assert places([node("a", 3), node("b", 4)], size(4), 1) == ["bbbb"]
    assert places([node("a", 3), node("b", 2), node("c", 2)], size(4), 1) == ["aaab"]
    assert places([node("a", 3), node("b", 2)], size(4, "STRICT_PACK"), 1) == []


def test_the_strategy_spreads_the_workers_of_an_engine() -> None:
    nodes = [node("a", 4), node("b", 4), node("c", 1)]
    assert places(nodes, size(4, "SPREAD"), 1) == ["aabc"]
    assert places(nodes, size(3, "STRICT_SPREAD"), 2) == ["abc"]


def test_dead_nodes_and_what_others_hold_are_no_room() -> None:
    nodes = [node("a", 8, is_alive=False), node("b", 8, 1), node("c", 2)]
    assert places(nodes, size(), 9) == ["b", "c", "c"]


def test_fractions() -> None:
    assert places([node("a", 1), node("b", 1)], size(amount=0.5), 5) == ["a", "a", "b", "b"]


holds = st.lists(
    st.builds(Reservation, nodes=st.lists(st.sampled_from(["a" * 8, "b" * 8, "z" * 8]), min_size=1, max_size=3)),
    max_size=3,
)
rooms = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), min_size=1, max_size=6)


@given(
    rooms=rooms,
    num_bundles=st.integers(1, 5),
    amount=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    strategy=st.sampled_from(STRATEGIES),
    policy=st.sampled_from(POLICIES),
    ranks=st.sets(st.integers(0, 9), max_size=6),
    held=holds,
)
def test_a_plan_keeps_what_it_promises(rooms, num_bundles, amount, strategy, policy, ranks, held) -> None:
    nodes = [node("abcdef"[i], max(r), min(r[:2]), is_alive=r[2]) for i, r in enumerate(rooms)]
    wanted = size(num_bundles, strategy, amount)
    free = free_of_holds(nodes, held, wanted.bundle)
    running = [hold.nodes for hold in held]
    found = place_engines(free, wanted, ranks=ranks, running=running, policy=policy)

    again = place_engines(free[::-1], wanted, ranks=sorted(ranks, reverse=True), running=running, policy=policy)
    assert found == again, "the order of what is known makes no difference"
    assert list(found) == sorted(ranks)[: len(found)], "in order of rank"

    room = {one.node_id: one.free["GPU"] for one in free if one.is_alive}
    for chosen in found.values():
        assert len(chosen) == num_bundles
        for node_id in chosen:
            room[node_id] -= amount
        blocks = [node_id for index, node_id in enumerate(chosen) if index == 0 or chosen[index - 1] != node_id]
        assert len(blocks) == len(set(blocks)), "neighbours in rank are neighbours in the cluster"
        if strategy == "STRICT_PACK":
            assert len(set(chosen)) == 1
        if strategy == "STRICT_SPREAD":
            assert len(set(chosen)) == num_bundles
    assert all(room[node_id] >= -1e-9 for chosen in found.values() for node_id in chosen), "no more than there is"
    if policy == "strict-spread":
        engines = Counter(node_id for chosen in found.values() for node_id in set(chosen))
        engines.update({node_id for nodes_of_one in running for node_id in nodes_of_one} & room.keys())
        assert all(engines[n] <= 1 for chosen in found.values() for n in chosen)
    if policy != "strict-spread" and strategy != "STRICT_SPREAD" and len(found) < len(ranks):
        left = [int(max(0.0, amount_left) / amount) for amount_left in room.values()]
        fits = sum(left) if strategy != "STRICT_PACK" else max(left, default=0)
        assert fits < num_bundles, "nobody is left out who has room"


def test_what_the_control_store_has_heard_of_is_not_counted_twice() -> None:
    heard = replace(node("a", 4, 3), free={"GPU": 3.0, "bundle_group_0_abc": 1000.0})
    nodes = [heard, node("b", 4)]
    held = [Reservation(nodes=["a" * 8, "b" * 8], group_id="abc"), Reservation(nodes=["b" * 8], group_id=None)]
    free = {one.node_id[0]: one.free["GPU"] for one in free_of_holds(nodes, held, GPU)}
    assert free == {"a": 3.0, "b": 2.0}


def test_a_group_is_divided_among_engines_in_order() -> None:
    bundles = [Bundle(index=i, node_id=n, total=GPU, free={}) for i, n in enumerate("abab")]
    assert divide_bundles(bundles, worker=GPU, world_size=2, num_engines=2) == [[0, 2], [1, 3]]
    assert divide_bundles(bundles, worker=GPU, world_size=1, num_engines=3, near="b") == [[1], [3], [0]]
    large = [Bundle(index=0, node_id="a", total={"GPU": 4}, free={})]
    uneven = [Bundle(index=i, node_id=n, total=GPU, free=GPU) for i, n in enumerate("aaabb")]
    assert divide_bundles(uneven, worker=GPU, world_size=2, num_engines=2, tensor=2) == [[0, 1], [3, 4]]
    assert divide_bundles(uneven, worker=GPU, world_size=4, num_engines=1, tensor=2) == [[0, 1, 3, 4]]
    assert divide_bundles(large, worker={"GPU": 0.5}, world_size=2, num_engines=4) == [[0, 0]] * 4


def test_a_group_that_is_too_small_says_how_many_engines_fit() -> None:
    bundles = [Bundle(index=i, node_id="a", total=GPU, free=GPU) for i in range(3)]
    with pytest.raises(ClusterError) as caught:
        divide_bundles(bundles, worker=GPU, world_size=2, num_engines=2)
    assert str(caught.value) == (
        "the placement group is too small: it has room for 1 of 2 engines, each of 2 x {GPU: 1}; its bundles are "
        "0: {GPU: 1}, 1: {GPU: 1}, 2: {GPU: 1}; `data_parallel_size` 1 would fit"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tensor_parallel_size": 2}, EngineSize(bundle={"CPU": 1}, num_bundles=2, tensor=2)),
        (
            {"tensor_parallel_size": 2, "ray_worker_resources": {"GPU": 0.5}, "ray_placement_strategy": "SPREAD"},
            EngineSize(bundle={"GPU": 0.5}, num_bundles=2, tensor=2, strategy="SPREAD"),
        ),
        ({"executor": "in-process"}, EngineSize(bundle={"CPU": 1}, num_bundles=1)),
        (
            {"executor": "processes", "tensor_parallel_size": 3, "ray_worker_resources": {"GPU": 0.5, "CPU": 2}},
            EngineSize(bundle={"GPU": 2, "CPU": 6}, num_bundles=1),
        ),
    ],
)
def test_what_an_engine_takes_depends_on_what_its_workers_are(options, expected) -> None:
    config = build_config(data_parallel_backend="ray", device="cpu", **options)
    assert engine_size(config, [{"CPU": 4}]) == expected


def said(nodes: list[Node], wanted: EngineSize, num_engines: int, *, policy: str = "pack", tensor: int = 1):
    return explain_engine_shortage(nodes, wanted, num_engines=num_engines, policy=policy, tensor=tensor, pipeline=1)


def test_a_shortage_says_what_fits_where() -> None:
    shortage = said([node("a", 4, 3), node("b", 2)], size(2), 4, tensor=2)
    assert not shortage.may_pass
    assert shortage.text == (
        "the cluster cannot hold 4 engines of 2 workers of {GPU: 1}: node 10.0.0.1 (aaaaaaaa) has GPU 3 free of 4 "
        "(room for 2 engines); node 10.0.0.2 (bbbbbbbb) has GPU 2 free of 2 (room for an engine); "
        "`data_parallel_size` 3 or `tensor_parallel_size` 1 would fit"
    )


def test_what_others_hold_may_pass() -> None:
    shortage = said([node("a", 4, 1)], size(), 2)
    assert shortage.may_pass
    assert "2 engines of {GPU: 1} were asked for and the cluster has room, but others hold a part" in shortage.text


def test_where_nothing_fits_that_is_said() -> None:
    text = said([node("a", 0)], size(), 1).text
    assert "cannot hold an engine of {GPU: 1}" in text
    assert "(room for none); nothing of that kind fits: set `ray_worker_resources`" in text
    assert "no node may be used" in said([], size(), 1).text


def test_the_policy_is_part_of_what_was_asked() -> None:
    text = said([node("a", 4)], size(), 2, policy="strict-spread").text
    assert "2 engines of {GPU: 1}, no two on a node (strict-spread)" in text
    assert "`data_parallel_size` 1 would fit" in text


NODES = [node("a", 1, hostname="alpha"), node("b", 1, hostname="beta"), node("c", 1, is_alive=False)]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], "abc"),
        (["a" * 8], "a"),
        (["beta", "10.0.0.1"], "ab"),
        (["10.0.0.3"], "c"),  # it was there: no mistake, but no room either
    ],
)
def test_nodes_are_named_by_id_host_name_or_address(names: list[str], found: str) -> None:
    assert "".join(one.node_id[0] for one in only(NODES, names)) == found


def test_the_beginning_of_an_id_names_it_if_it_has_8_digits() -> None:
    long = [replace(NODES[0], node_id="0123456789abcdef")]
    assert only(long, ["0123456789"]) == long
    with pytest.raises(ClusterError):
        only(long, ["0123456"])


def test_a_name_of_no_node_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ClusterError, match=r"no node is 'gamma'; .* of these: 10\.0\.0\.1 \(aaaaaaaa\) alpha, 10"):
        only(NODES, ["alpha", "gamma"])
