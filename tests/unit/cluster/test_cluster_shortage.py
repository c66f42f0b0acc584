"""What fits into the cluster, and what is said when it is not enough."""

from __future__ import annotations

import pytest

from eagleray.cluster.capacity import explain_shortage, largest_parallel, worker_capacity
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


@pytest.mark.parametrize(("strategy", "count"), [("PACK", 6), ("SPREAD", 6), ("STRICT_PACK", 4), ("STRICT_SPREAD", 2)])
def test_room_depends_on_the_strategy(strategy: str, count: int) -> None:
    nodes = [node("a", 4), node("b", 2), node("c", 0), node("d", 8, is_alive=False)]
    assert worker_capacity(nodes, GPU, strategy) == count


def test_room_now_is_what_nobody_holds() -> None:
    assert worker_capacity([node("a", 4, 1), node("b", 2, 2)], GPU, "PACK", free=True) == 3


@pytest.mark.parametrize(
    ("world", "tensor", "pipeline", "sizes"),
    [(3, 4, 1, (2, 1)), (6, 8, 1, (4, 1)), (6, 4, 2, (4, 1)), (2, 4, 2, (2, 1)), (5, 2, 4, (2, 2)), (0, 2, 1, None)],
)
def test_the_largest_sizes_that_fit(world: int, tensor: int, pipeline: int, sizes: tuple[int, int] | None) -> None:
    assert largest_parallel(world, tensor=tensor, pipeline=pipeline) == sizes


def test_a_shortage_names_what_was_asked_what_each_node_has_and_what_would_fit() -> None:
    said = explain_shortage([node("a", 2, 1), node("b", 1)], GPU, "PACK", tensor=4, pipeline=1)
    assert said == (
        "the cluster cannot hold 4 workers of {GPU: 1}: node 10.0.0.1 (aaaaaaaa) has GPU 1 free of 2; "
        "node 10.0.0.2 (bbbbbbbb) has GPU 1 free of 1; `tensor_parallel_size` 2 would fit"
    )


def test_a_shortage_with_stages_names_both_sizes() -> None:
    said = explain_shortage([node("a", 2)], GPU, "PACK", tensor=2, pipeline=2)
    assert "`tensor_parallel_size` 2 with `pipeline_parallel_size` 1 would fit" in said


def test_where_nothing_fits_that_is_said() -> None:
    assert "nothing of that kind fits" in explain_shortage([node("a", 0)], GPU, "PACK", tensor=2, pipeline=1)


def test_a_strict_strategy_is_named() -> None:
    said = explain_shortage([node("a", 2), node("b", 2)], GPU, "STRICT_PACK", tensor=4, pipeline=1)
    assert "all on one node (STRICT_PACK)" in said
    assert "`tensor_parallel_size` 2 would fit" in said


def test_what_others_hold_is_told_from_what_is_missing() -> None:
    assert "but others hold a part" in explain_shortage([node("a", 2, 0)], GPU, "PACK", tensor=2, pipeline=1)
