"""Placement of engines on the nodes of a cluster."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.cluster.bundles import Bundle
from eagleray.cluster.engine_placement import (
    EngineReservation,
    EngineSize,
    divide_bundles,
    engine_size,
    place_engines,
    subtract_reservations,
)
from eagleray.cluster.nodes import Node
from eagleray.config.build import build_config
from eagleray.errors import ClusterError

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


def placed_nodes(nodes: list[Node], wanted: EngineSize, num_engines: int, **options) -> list[str]:
    """Return the nodes of each engine, as letters, in order of rank."""
    found = place_engines(nodes, wanted, ranks=range(num_engines), **{"policy": "pack", **options})
    assert list(found) == list(range(len(found)))
    return ["".join(node_id[0] for node_id in chosen) for chosen in found.values()]


def test_place_engines_pack_fills_one_node_after_the_other() -> None:
    assert placed_nodes([node("b", 2), node("a", 2), node("c", 2)], size(), 5) == ["a", "a", "b", "b", "c"]


def test_place_engines_keeps_a_stage_on_one_node_if_one_has_room() -> None:
    two_stages = replace(size(4), tp_size=2)
    assert placed_nodes([node("a", 3), node("b", 2)], two_stages, 1) == ["aabb"]
    assert placed_nodes([node("a", 1), node("b", 5), node("c", 3)], replace(size(6), tp_size=2), 1) == ["bbbbcc"]
    assert placed_nodes([node("a", 1), node("b", 1), node("c", 2)], two_stages, 1) == ["ccab"]  # not possible for both


def test_place_engines_spread_takes_the_node_with_the_fewest_engines() -> None:
    assert placed_nodes([node("a", 4), node("b", 1), node("c", 2)], size(), 6, policy="spread") == list("abcaca")


def test_place_engines_spread_counts_running_engines() -> None:
    running = [["a" * 8], ["a" * 8], ["b" * 8]]
    assert placed_nodes([node("a", 4), node("b", 4)], size(), 2, policy="spread", running=running) == ["b", "a"]


def test_place_engines_strict_spread_puts_one_engine_on_a_node() -> None:
    nodes = [node("a", 4), node("b", 4), node("c", 4)]
    assert placed_nodes(nodes, size(2), 4, policy="strict-spread") == ["aa", "bb", "cc"]
    assert placed_nodes(nodes, size(2), 4, policy="strict-spread", running=[["b" * 8]]) == ["aa", "cc"]


def test_place_engines_spread_does_not_fit_packs() -> None:
    # every engine needs a worker on a, the only node that has room for more than one
    nodes = [node("a", 3), node("b", 1), node("c", 1), node("d", 1)]
    found = placed_nodes(nodes, size(2, "STRICT_SPREAD"), 3, policy="spread")
    assert sorted(found) == ["ab", "ac", "ad"]


def test_place_engines_preferred_node_comes_first() -> None:
    assert placed_nodes([node("a", 1), node("b", 1)], size(), 2, preferred_node="b" * 8) == ["b", "a"]


def test_place_engines_begin_on_preferred_comes_before_nodes_with_more_room() -> None:
    nodes = [node("a", 3), node("b", 2), node("c", 2)]
    options = {"preferred_node": "c" * 8, "begin_on_preferred": True}
    assert placed_nodes(nodes, size(4), 1, **options) == ["ccaa"]
    assert placed_nodes([*nodes, node("d", 4)], size(4), 1, **options) == ["dddd"]


def test_place_engines_uses_several_nodes_only_if_none_has_room() -> None:
    assert placed_nodes([node("a", 3), node("b", 4)], size(4), 1) == ["bbbb"]
    assert placed_nodes([node("a", 3), node("b", 2), node("c", 2)], size(4), 1) == ["aaab"]
    assert placed_nodes([node("a", 3), node("b", 2)], size(4, "STRICT_PACK"), 1) == []


def test_place_engines_strategy_spreads_the_workers_of_an_engine() -> None:
    nodes = [node("a", 4), node("b", 4), node("c", 1)]
    assert placed_nodes(nodes, size(4, "SPREAD"), 1) == ["aabc"]
    assert placed_nodes(nodes, size(3, "STRICT_SPREAD"), 2) == ["abc"]


def test_place_engines_skips_dead_nodes_and_held_resources() -> None:
    nodes = [node("a", 8, is_alive=False), node("b", 8, 1), node("c", 2)]
    assert placed_nodes(nodes, size(), 9) == ["b", "c", "c"]


def test_place_engines_fractions_share_a_device() -> None:
    assert placed_nodes([node("a", 1), node("b", 1)], size(amount=0.5), 5) == ["a", "a", "b", "b"]


reservation_lists = st.lists(
    st.builds(EngineReservation, nodes=st.lists(st.sampled_from(["a" * 8, "b" * 8, "z" * 8]), min_size=1, max_size=3)),
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
    held=reservation_lists,
)
def test_place_engines_any_cluster_keeps_its_promises(
    rooms, num_bundles, amount, strategy, policy, ranks, held
) -> None:
    nodes = [node("abcdef"[i], max(r), min(r[:2]), is_alive=r[2]) for i, r in enumerate(rooms)]
    wanted = size(num_bundles, strategy, amount)
    free = subtract_reservations(nodes, held, wanted.bundle)
    running = [reservation.nodes for reservation in held]
    found = place_engines(free, wanted, ranks=ranks, running=running, policy=policy)

    again = place_engines(free[::-1], wanted, ranks=sorted(ranks, reverse=True), running=running, policy=policy)
    assert found == again, "the order of the arguments makes no difference"
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
        assert fits < num_bundles, "every engine that has room is placed"


def test_subtract_reservations_group_that_the_control_store_shows_is_not_counted_twice() -> None:
    heard = replace(node("a", 4, 3), free={"GPU": 3.0, "bundle_group_0_abc": 1000.0})
    nodes = [heard, node("b", 4)]
    held = [
        EngineReservation(nodes=["a" * 8, "b" * 8], group_id="abc"),
        EngineReservation(nodes=["b" * 8], group_id=None),
    ]
    free = {one.node_id[0]: one.free["GPU"] for one in subtract_reservations(nodes, held, GPU)}
    assert free == {"a": 3.0, "b": 2.0}


def test_divide_bundles_divides_among_engines_in_order() -> None:
    bundles = [Bundle(index=i, node_id=n, total=GPU, free={}) for i, n in enumerate("abab")]
    assert divide_bundles(bundles, worker=GPU, world_size=2, num_engines=2) == [[0, 2], [1, 3]]
    assert divide_bundles(bundles, worker=GPU, world_size=1, num_engines=3, preferred_node="b") == [[1], [3], [0]]
    large = [Bundle(index=0, node_id="a", total={"GPU": 4}, free={})]
    uneven = [Bundle(index=i, node_id=n, total=GPU, free=GPU) for i, n in enumerate("aaabb")]
    assert divide_bundles(uneven, worker=GPU, world_size=2, num_engines=2, tp_size=2) == [[0, 1], [3, 4]]
    assert divide_bundles(uneven, worker=GPU, world_size=4, num_engines=1, tp_size=2) == [[0, 1, 3, 4]]
    assert divide_bundles(large, worker={"GPU": 0.5}, world_size=2, num_engines=4) == [[0, 0]] * 4


def test_divide_bundles_too_small_group_says_how_many_engines_fit() -> None:
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
        ({"tensor_parallel_size": 2}, EngineSize(bundle={"CPU": 1}, num_bundles=2, tp_size=2)),
        (
            {"tensor_parallel_size": 2, "ray_worker_resources": {"GPU": 0.5}, "ray_placement_strategy": "SPREAD"},
            EngineSize(bundle={"GPU": 0.5}, num_bundles=2, tp_size=2, strategy="SPREAD"),
        ),
        ({"executor": "in-process"}, EngineSize(bundle={"CPU": 1}, num_bundles=1)),
        (
            {"executor": "processes", "tensor_parallel_size": 3, "ray_worker_resources": {"GPU": 0.5, "CPU": 2}},
            EngineSize(bundle={"GPU": 2, "CPU": 6}, num_bundles=1),
        ),
    ],
)
def test_engine_size_depends_on_the_kind_of_workers(options, expected) -> None:
    config = build_config(data_parallel_backend="ray", device="cpu", **options)
    assert engine_size(config, [{"CPU": 4}]) == expected
