"""Assignment of workers to the bundles of a placement group."""

from __future__ import annotations

from functools import partial

import pytest

from eagleray.cluster.bundles import (
    Bundle,
    BundlesBusy,
    assign_bundles,
    bundles_at,
    check_caller_leaves_room,
    count_fitting,
    held_in_group,
    in_rank_order,
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


def test_in_rank_order_engine_node_comes_first_then_node_by_node_then_index() -> None:
    bundles = make(("b", GPU), ("a", GPU), (ENGINE, GPU), ("b", GPU), (ENGINE, GPU), ("a", GPU))
    assert indices(in_rank_order(bundles, ENGINE)) == [2, 4, 0, 3, 1, 5]


def test_in_rank_order_does_not_depend_on_the_given_order() -> None:
    bundles = make(("b", GPU), ("a", GPU), (ENGINE, GPU), ("b", GPU))
    assert in_rank_order(reversed(bundles), ENGINE) == in_rank_order(bundles, ENGINE)


def test_assign_bundles_sorts_before_it_cuts_to_the_world_size() -> None:
    bundles = make(("a", GPU), ("b", GPU), (ENGINE, GPU))
    assert indices(assign_bundles(bundles, worker=GPU, world_size=2, engine_node=ENGINE)) == [2, 0]


def test_assign_bundles_keeps_a_stage_on_one_node_if_one_has_room() -> None:
    bundles = make((ENGINE, GPU), ("a", GPU), ("a", GPU), ("b", GPU), ("b", GPU))
    options = {"worker": GPU, "engine_node": ENGINE, "tp_size": 2}
    assert indices(assign_bundles(bundles, world_size=2, **options)) == [1, 2]
    assert indices(assign_bundles(bundles, world_size=4, **options)) == [1, 2, 3, 4]
    assert indices(assign_bundles(bundles[:4], world_size=4, **options)) == [
        1,
        2,
        0,
        3,
    ]  # the second group must straddle


def test_assign_bundles_engine_on_a_node_without_bundles_uses_other_nodes() -> None:
    bundles = make(("a", GPU), ("b", GPU))
    assert indices(assign_bundles(bundles, worker=GPU, world_size=2, engine_node=ENGINE)) == [0, 1]


def test_assign_bundles_puts_every_worker_that_fits_into_a_bundle() -> None:
    bundles = make(("a", {"GPU": 2, "CPU": 8}), (ENGINE, {"GPU": 2, "CPU": 8}))
    assert indices(assign_bundles(bundles, worker=GPU, world_size=3, engine_node=ENGINE)) == [1, 1, 0]


def test_assign_bundles_fractions_share_a_device() -> None:
    bundles = make((ENGINE, {"GPU": 1}))
    assert indices(assign_bundles(bundles, worker={"GPU": 0.5}, world_size=2, engine_node=ENGINE)) == [0, 0]


@pytest.mark.parametrize(("amount", "count"), [(0.1, 10), (0.3, 3), (1 / 3, 3), (0.25, 4), (1, 1), (2, 0)])
def test_count_fitting_counts_fractions_as_ray_does(amount: float, count: int) -> None:
    assert count_fitting({"GPU": 1.0}, {"GPU": round(amount, 4)}) == count


def test_count_fitting_scarcest_resource_decides() -> None:
    assert count_fitting({"GPU": 4, "CPU": 3, "acc": 9}, {"GPU": 1, "CPU": 2}) == 1


def test_assign_bundles_skips_bundles_of_another_kind() -> None:
    bundles = make((ENGINE, {"CPU": 1}), (ENGINE, GPU), ("a", GPU))
    assert indices(assign_bundles(bundles, worker=GPU, world_size=2, engine_node=ENGINE)) == [1, 2]


def test_assign_bundles_does_not_use_what_others_hold() -> None:
    bundles = make((ENGINE, GPU), (ENGINE, GPU), ("a", GPU), free={0: {}})
    assert indices(assign_bundles(bundles, worker=GPU, world_size=2, engine_node=ENGINE)) == [1, 2]


def test_assign_bundles_too_small_group_is_refused_with_its_bundles() -> None:
    with pytest.raises(ClusterError, match=r"room for 1 of 2 workers of \{GPU: 1\}; its bundles are 0: \{GPU: 1\}"):
        assign_bundles(make((ENGINE, GPU)), worker=GPU, world_size=2, engine_node=ENGINE)


def test_assign_bundles_group_without_the_resource_is_refused_with_its_bundles() -> None:
    with pytest.raises(ClusterError, match=r"no bundle of the placement group holds GPU.*0: \{CPU: 2\}"):
        assign_bundles(make(("a", {"CPU": 2})), worker=GPU, world_size=1, engine_node=ENGINE)


def test_assign_bundles_held_bundles_raise_bundles_busy() -> None:
    bundles = make((ENGINE, GPU), ("a", GPU), free={0: {"GPU": 0.5}})
    with pytest.raises(BundlesBusy, match=r"1 of the 2 workers fit now"):
        assign_bundles(bundles, worker=GPU, world_size=2, engine_node=ENGINE)
    with pytest.raises(BundlesBusy, match=r"bundle 0 .* somebody else holds it"):
        assign_bundles(bundles, worker=GPU, world_size=1, engine_node=ENGINE, indices=[0])


def test_assign_bundles_uses_indices_exactly() -> None:
    bundles = make((ENGINE, GPU), ("a", GPU), ("b", GPU), (ENGINE, GPU))
    chosen = assign_bundles(bundles, worker=GPU, world_size=3, engine_node=ENGINE, indices=[2, 0, 1])
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
def test_assign_bundles_wrong_indices_are_refused(given: list[int], message: str) -> None:
    bundles = make((ENGINE, GPU), (ENGINE, GPU), (ENGINE, {"CPU": 1}))
    with pytest.raises(ConfigError, match=message):
        assign_bundles(bundles, worker=GPU, world_size=2, engine_node=ENGINE, indices=given)


def test_assign_bundles_index_of_a_bundle_of_another_kind_is_refused() -> None:
    bundles = make((ENGINE, GPU), (ENGINE, {"CPU": 1}))
    with pytest.raises(ClusterError, match=r"bundle 1 of the placement group holds \{CPU: 1\}, but a worker takes"):
        assign_bundles(bundles, worker=GPU, world_size=2, engine_node=ENGINE, indices=[0, 1])


def test_bundles_at_repeated_index_shares_the_bundle() -> None:
    bundles = make((ENGINE, {"GPU": 2}), ("a", GPU))
    assert indices(bundles_at(bundles, [0, 0, 1], worker=GPU)) == [0, 0, 1]
    with pytest.raises(ClusterError, match=r"bundle 1 .* holds \{GPU: 1\}, but 2 workers take \{GPU: 1\} each"):
        bundles_at(bundles, [1, 1], worker=GPU)
    busy = make((ENGINE, {"GPU": 2}), free={0: GPU})
    with pytest.raises(BundlesBusy, match=r"\{GPU: 1\} free of \{GPU: 2\}, but 2 workers take"):
        bundles_at(busy, [0, 0], worker=GPU)


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
def test_worker_resources_depend_on_option_device_and_offer(
    asked: dict[str, float], device: str, offered: list[dict[str, float]], taken: dict[str, float]
) -> None:
    assert worker_resources(asked, device, offered) == taken


GROUP_ID = "86ace7765aca02a7d3c7939445bf01000000"


def test_held_in_group_returns_the_resources_of_each_bundle() -> None:
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
def test_check_caller_leaves_room_caller_that_would_wait_for_itself_is_named(chosen_by_index: bool) -> None:
    bundles = make((ENGINE, GPU), ("a", GPU), free={0: {}})
    caller = RayCaller(name="Maker.make (actor 1a2b3c4d, process 7)", held={0: {"GPU": 1.0}})
    given = [0] if chosen_by_index else []
    choose = partial(assign_bundles, worker=GPU, world_size=2 - len(given), engine_node=ENGINE, indices=given)
    with pytest.raises(BundlesBusy) as busy:
        choose(bundles)
    with pytest.raises(ClusterError, match=r"Maker.make \(actor 1a2b3c4d, process 7\), .*holds \{GPU: 1\} of bundle 0"):
        check_caller_leaves_room(caller, bundles, choose, busy.value)


def test_check_caller_leaves_room_bundles_that_others_hold_passes() -> None:
    bundles = make((ENGINE, GPU), ("a", GPU), free={0: {}, 1: {}})
    caller = RayCaller(name="actor", held={0: {"GPU": 1.0}})
    choose = partial(assign_bundles, worker=GPU, world_size=1, engine_node=ENGINE)
    with pytest.raises(BundlesBusy) as busy:
        choose(bundles)
    check_caller_leaves_room(caller, bundles, choose, busy.value)
