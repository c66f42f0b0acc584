"""Capacity of the cluster, and the sentences that explain a shortage."""

from __future__ import annotations

import pytest

from eagleray.cluster.capacity import (
    CapacityShortage,
    explain_engine_shortage,
    explain_shortage,
    largest_parallel,
    worker_capacity,
)
from eagleray.cluster.engine_placement import EngineSize, Policy
from eagleray.cluster.nodes import Node

GPU = {"GPU": 1.0}


def node(name: str, total: float, free: float | None = None, *, is_alive: bool = True) -> Node:
    return Node(
        node_id=name * 8,
        ip=f"10.0.0.{ord(name) - ord('a') + 1}",
        is_alive=is_alive,
        total={"GPU": total},
        free={"GPU": total if free is None else free},
    )


def explain_workers(nodes: list[Node], strategy: str, *, tensor: int, pipeline: int) -> str:
    size = EngineSize(bundle=GPU, num_bundles=tensor * pipeline, strategy=strategy)
    return explain_shortage(nodes, size, tensor=tensor, pipeline=pipeline).text


@pytest.mark.parametrize(("strategy", "count"), [("PACK", 6), ("SPREAD", 6), ("STRICT_PACK", 4), ("STRICT_SPREAD", 2)])
def test_worker_capacity_depends_on_the_strategy(strategy: str, count: int) -> None:
    nodes = [node("a", 4), node("b", 2), node("c", 0), node("d", 8, is_alive=False)]
    assert worker_capacity(nodes, GPU, strategy) == count


def test_worker_capacity_free_counts_what_is_not_held() -> None:
    assert worker_capacity([node("a", 4, 1), node("b", 2, 2)], GPU, "PACK", free=True) == 3


@pytest.mark.parametrize(
    ("world", "tensor", "pipeline", "sizes"),
    [(3, 4, 1, (2, 1)), (6, 8, 1, (4, 1)), (6, 4, 2, (4, 1)), (2, 4, 2, (2, 1)), (5, 2, 4, (2, 2)), (0, 2, 1, None)],
)
def test_largest_parallel_returns_the_largest_divisors_that_fit(
    world: int, tensor: int, pipeline: int, sizes: tuple[int, int] | None
) -> None:
    assert largest_parallel(world, tensor=tensor, pipeline=pipeline) == sizes


def test_explain_shortage_names_request_nodes_and_what_would_fit() -> None:
    said = explain_workers([node("a", 2, 1), node("b", 1)], "PACK", tensor=4, pipeline=1)
    assert said == (
        "the cluster cannot hold 4 workers of {GPU: 1}: node 10.0.0.1 (aaaaaaaa) has GPU 1 free of 2; "
        "node 10.0.0.2 (bbbbbbbb) has GPU 1 free of 1; `tensor_parallel_size` 2 would fit"
    )


def test_explain_shortage_with_stages_names_both_sizes() -> None:
    said = explain_workers([node("a", 2)], "PACK", tensor=2, pipeline=2)
    assert "`tensor_parallel_size` 2 with `pipeline_parallel_size` 1 would fit" in said


def test_explain_shortage_where_nothing_fits_says_so() -> None:
    assert "nothing of that kind fits" in explain_workers([node("a", 0)], "PACK", tensor=2, pipeline=1)


def test_explain_shortage_names_a_strict_strategy() -> None:
    said = explain_workers([node("a", 2), node("b", 2)], "STRICT_PACK", tensor=4, pipeline=1)
    assert "all on one node (STRICT_PACK)" in said
    assert "`tensor_parallel_size` 2 would fit" in said


def test_explain_shortage_resources_that_others_hold_may_pass() -> None:
    assert "but others hold a part" in explain_workers([node("a", 2, 0)], "PACK", tensor=2, pipeline=1)


def explain_engines(
    nodes: list[Node], size: EngineSize, num_engines: int, *, policy: Policy = "pack", tensor: int = 1
) -> CapacityShortage:
    return explain_engine_shortage(nodes, size, num_engines=num_engines, policy=policy, tensor=tensor, pipeline=1)


def test_explain_engine_shortage_says_what_fits_where() -> None:
    shortage = explain_engines([node("a", 4, 3), node("b", 2)], EngineSize(bundle=GPU, num_bundles=2), 4, tensor=2)
    assert not shortage.may_pass
    assert shortage.text == (
        "the cluster cannot hold 4 engines of 2 workers of {GPU: 1}: node 10.0.0.1 (aaaaaaaa) has GPU 3 free of 4 "
        "(room for 2 engines); node 10.0.0.2 (bbbbbbbb) has GPU 2 free of 2 (room for an engine); "
        "`data_parallel_size` 3 or `tensor_parallel_size` 1 would fit"
    )


def test_explain_engine_shortage_resources_that_others_hold_may_pass() -> None:
    shortage = explain_engines([node("a", 4, 1)], EngineSize(bundle=GPU, num_bundles=1), 2)
    assert shortage.may_pass
    assert "2 engines of {GPU: 1} were asked for and the cluster has room, but others hold a part" in shortage.text


def test_explain_engine_shortage_where_nothing_fits_says_so() -> None:
    text = explain_engines([node("a", 0)], EngineSize(bundle=GPU, num_bundles=1), 1).text
    assert "cannot hold an engine of {GPU: 1}" in text
    assert "(room for none); nothing of that kind fits: set `ray_worker_resources`" in text
    assert "no node may be used" in explain_engines([], EngineSize(bundle=GPU, num_bundles=1), 1).text


def test_explain_engine_shortage_names_the_policy() -> None:
    text = explain_engines([node("a", 4)], EngineSize(bundle=GPU, num_bundles=1), 2, policy="strict-spread").text
    assert "2 engines of {GPU: 1}, no two on a node (strict-spread)" in text
    assert "`data_parallel_size` 1 would fit" in text
