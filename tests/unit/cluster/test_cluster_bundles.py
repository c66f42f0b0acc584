"""Which worker goes into which bundle."""

from __future__ import annotations

from functools import partial

import pytest

from eagleray.cluster.bundles import (
    Bundle,
    BundlesBusy,
    assign,
    check_caller_leaves_room,
    fitting,
    held_in_group,
    in_rank_order,
    take,
    worker_resources,
)
from eagleray.errors import ClusterError, ConfigError
from eagleray.messages.workers import RayCaller

ENGINE = "node-e"


def make(*bundles: tuple[str, dict[str, float]], free: dict[int, dict[str, float]] | None = None) -> list[Bundle]:
    return [
        Bundle(index=index, node_id=node, total=total, free=(free or {}).get(index, total))
        for index, (node, total) in enumerate(bundles)
    ]


def indices(bundles: list[Bundle]) -> list[int]:
    return [bundle.index for bundle in bundles]


GPU = {"GPU": 1.0}


def test_the_engines_node_comes_first_then_node_by_node_then_index() -> None:
    bundles = make(("b", GPU), ("a", GPU), (ENGINE, GPU), ("b", GPU), (ENGINE, GPU), ("a", GPU))
    assert indices(in_rank_order(bundles, ENGINE)) == [2, 4, 0, 3, 1, 5]


def test_the_order_does_not_depend_on_the_order_given() -> None:
    bundles = make(("b", GPU), ("a", GPU), (ENGINE, GPU), ("b", GPU))
    assert in_rank_order(reversed(bundles), ENGINE) == in_rank_order(bundles, ENGINE)


def test_bundles_are_cut_to_the_world_size_only_after_sorting() -> None:
    bundles = make(("a", GPU), ("b", GPU), (ENGINE, GPU))
    assert indices(assign(bundles, worker=GPU, world_size=2, engine_node=ENGINE)) == [2, 0]


def test_assign_keeps_a_tensor_parallel_group_on_one_node_if_one_has_room() -> None:
    bundles = make((ENGINE, GPU), ("a", GPU), ("a", GPU), ("b", GPU), ("b", GPU))
    options = {"worker": GPU, "engine_node": ENGINE, "tensor": 2}
    assert indices(assign(bundles, world_size=2, **options)) == [1, 2]
    assert indices(assign(bundles, world_size=4, **options)) == [1, 2, 3, 4]
    assert indices(assign(bundles[:4], world_size=4, **options)) == [1, 2, 0, 3]  # the second group must straddle


def test_an_engine_on_a_node_without_bundles_is_no_trouble() -> None:
    bundles = make(("a", GPU), ("b", GPU))
    assert indices(assign(bundles, worker=GPU, world_size=2, engine_node=ENGINE)) == [0, 1]


def test_a_bundle_takes_as_many_workers_as_fit() -> None:
    bundles = make(("a", {"GPU": 2, "CPU": 8}), (ENGINE, {"GPU": 2, "CPU": 8}))
    assert indices(assign(bundles, worker=GPU, world_size=3, engine_node=ENGINE)) == [1, 1, 0]


def test_fractions_share_a_device() -> None:
    bundles = make((ENGINE, {"GPU": 1}))
    assert indices(assign(bundles, worker={"GPU": 0.5}, world_size=2, engine_node=ENGINE)) == [0, 0]


@pytest.mark.parametrize(("amount", "count"), [(0.1, 10), (0.3, 3), (1 / 3, 3), (0.25, 4), (1, 1), (2, 0)])
def test_fractions_are_counted_as_ray_counts_them(amount: float, count: int) -> None:
    assert fitting({"GPU": 1.0}, {"GPU": round(amount, 4)}) == count


def test_the_scarcest_of_several_resources_decides() -> None:
    assert fitting({"GPU": 4, "CPU": 3, "acc": 9}, {"GPU": 1, "CPU": 2}) == 1


def test_bundles_of_another_kind_are_passed_over() -> None:
    bundles = make((ENGINE, {"CPU": 1}), (ENGINE, GPU), ("a", GPU))
    assert indices(assign(bundles, worker=GPU, world_size=2, engine_node=ENGINE)) == [1, 2]


def test_what_others_hold_is_not_used() -> None:
    bundles = make((ENGINE, GPU), (ENGINE, GPU), ("a", GPU), free={0: {}})
    assert indices(assign(bundles, worker=GPU, world_size=2, engine_node=ENGINE)) == [1, 2]


def test_too_small_a_group_is_refused_with_what_it_has() -> None:
    with pytest.raises(ClusterError, match=r"room for 1 of 2 workers of \{GPU: 1\}; its bundles are 0: \{GPU: 1\}"):
        assign(make((ENGINE, GPU)), worker=GPU, world_size=2, engine_node=ENGINE)


def test_a_group_without_the_resource_is_refused_with_what_it_has() -> None:
    with pytest.raises(ClusterError, match=r"no bundle of the placement group holds GPU.*0: \{CPU: 2\}"):
        assign(make(("a", {"CPU": 2})), worker=GPU, world_size=1, engine_node=ENGINE)


def test_bundles_that_are_held_are_a_matter_of_waiting() -> None:
    bundles = make((ENGINE, GPU), ("a", GPU), free={0: {"GPU": 0.5}})
    with pytest.raises(BundlesBusy, match=r"1 of the 2 workers fit now"):
        assign(bundles, worker=GPU, world_size=2, engine_node=ENGINE)
    with pytest.raises(BundlesBusy, match=r"bundle 0 .* somebody else holds it"):
        assign(bundles, worker=GPU, world_size=1, engine_node=ENGINE, indices=[0])


def test_indices_are_taken_exactly() -> None:
    bundles = make((ENGINE, GPU), ("a", GPU), ("b", GPU), (ENGINE, GPU))
    chosen = assign(bundles, worker=GPU, world_size=3, engine_node=ENGINE, indices=[2, 0, 1])
    assert indices(chosen) == [2, 0, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0], "1 were given, but there are 2 workers"),
        ([0, 1, 2], "3 were given, but there are 2 workers"),
        ([1, 1], "must be different"),
        ([0, 3], "there is no bundle 3; the placement group has 3"),
        ([-1, 0], "there is no bundle -1"),
    ],
)
def test_indices_that_make_no_sense_are_refused(given: list[int], message: str) -> None:
    bundles = make((ENGINE, GPU), (ENGINE, GPU), (ENGINE, {"CPU": 1}))
    with pytest.raises(ConfigError, match=message):
        assign(bundles, worker=GPU, world_size=2, engine_node=ENGINE, indices=given)


def test_an_index_of_a_bundle_of_another_kind_is_refused() -> None:
    bundles = make((ENGINE, GPU), (ENGINE, {"CPU": 1}))
    with pytest.raises(ClusterError, match=r"bundle 1 of the placement group holds \{CPU: 1\}, but a worker takes"):
        assign(bundles, worker=GPU, world_size=2, engine_node=ENGINE, indices=[0, 1])


def test_a_share_may_name_a_bundle_for_several_workers() -> None:
    bundles = make((ENGINE, {"GPU": 2}), ("a", GPU))
    assert indices(take(bundles, [0, 0, 1], worker=GPU)) == [0, 0, 1]
    with pytest.raises(ClusterError, match=r"bundle 1 .* holds \{GPU: 1\}, but 2 workers take \{GPU: 1\} each"):
        take(bundles, [1, 1], worker=GPU)
    busy = make((ENGINE, {"GPU": 2}), free={0: GPU})
    with pytest.raises(BundlesBusy, match=r"\{GPU: 1\} free of \{GPU: 2\}, but 2 workers take"):
        take(busy, [0, 0], worker=GPU)


@pytest.mark.parametrize(
    ("asked", "device", "offered", "taken"),
    [
        ({"acc": 2}, "auto", [{"GPU": 1}], {"acc": 2}),
        ({}, "auto", [{"CPU": 1}, {"GPU": 1}], {"GPU": 1}),
        ({}, "auto", [{"CPU": 1}], {"CPU": 1}),
        ({}, "cpu", [{"GPU": 1}], {"CPU": 1}),
        ({}, "cuda", [{"CPU": 1}], {"GPU": 1}),
    ],
)
def test_what_a_worker_takes(
    asked: dict[str, float], device: str, offered: list[dict[str, float]], taken: dict[str, float]
) -> None:
    assert worker_resources(asked, device, offered) == taken


GROUP_ID = "86ace7765aca02a7d3c7939445bf01000000"


def test_held_in_group_is_what_a_process_holds_of_each_bundle() -> None:
    resources = {
        f"bundle_group_1_{GROUP_ID}": 0.001,
        f"bundle_group_{GROUP_ID}": 0.001,
        f"GPU_group_{GROUP_ID}": 1.0,
        f"GPU_group_1_{GROUP_ID}": 1.0,
        f"my_group_1_{GROUP_ID}": 2.0,
        "CPU_group_0_ffff": 1.0,
        "CPU": 1.0,
    }
    assert held_in_group(resources, GROUP_ID) == {1: {"GPU": 1.0, "my": 2.0}}


@pytest.mark.parametrize("chosen_by_index", [False, True])
def test_check_caller_leaves_room_names_the_caller_that_would_wait_for_itself(chosen_by_index: bool) -> None:
    bundles = make((ENGINE, GPU), ("a", GPU), free={0: {}})
    caller = RayCaller(name="Maker.make (actor 1a2b3c4d, process 7)", held={0: {"GPU": 1.0}})
    given = [0] if chosen_by_index else []
    choose = partial(assign, worker=GPU, world_size=2 - len(given), engine_node=ENGINE, indices=given)
    with pytest.raises(BundlesBusy) as busy:
        choose(bundles)
    with pytest.raises(ClusterError, match=r"Maker.make \(actor 1a2b3c4d, process 7\), .*holds \{GPU: 1\} of bundle 0"):
        check_caller_leaves_room(caller, bundles, choose, busy.value)


def test_check_caller_leaves_room_of_bundles_that_others_hold_lets_it_wait() -> None:
    bundles = make((ENGINE, GPU), ("a", GPU), free={0: {}, 1: {}})
    caller = RayCaller(name="actor", held={0: {"GPU": 1.0}})
    choose = partial(assign, worker=GPU, world_size=1, engine_node=ENGINE)
    with pytest.raises(BundlesBusy) as busy:
        choose(bundles)
    check_caller_leaves_room(caller, bundles, choose, busy.value)
