"""Placement of an engine's workers on one to four nodes. No actor is created here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Timer
from typing import Any

import pytest
import ray_cluster
from ray.util.placement_group import placement_group_table
from ray_cluster import ACC, FAR, MakeGroup, config, new_engine

from eagleray.cluster import deadline
from eagleray.cluster.placement import EnginePlacement, place_workers
from eagleray.config.sections import Config
from eagleray.errors import ClusterError, ConfigError
from eagleray.messages.workers import RayContext

ON_HEAD = {"acc": 1.0, "node:__internal_head__": 0.001}


def inside(group_id: str | None, **options: Any) -> RayContext:
    """Return the context of a program in this placement group."""
    return RayContext(address="", placement_group=group_id, **options)


class Placed:
    """Places workers as an engine does, and closes the placements at the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __call__(self, config: Config, current_group: str | None = None) -> EnginePlacement:
        placement = place_workers(new_engine(), config, engine_node=ray_cluster.here(), context=inside(current_group))
        self._stack.callback(placement.close)
        return placement


@pytest.fixture
def placed() -> Iterator[Placed]:
    with ExitStack() as stack:
        yield Placed(stack)


def ips(placement: EnginePlacement) -> list[str]:
    return [ray_cluster.node_ips()[bundle.node_id] for bundle in placement.bundles]


def indices(placement: EnginePlacement) -> list[int]:
    return [bundle.index for bundle in placement.bundles]


def test_place_workers_that_fit_on_the_engines_node_are_placed_there(placed: Placed) -> None:
    placement = placed(config(tp=2))
    assert {bundle.node_id for bundle in placement.bundles} == {ray_cluster.here()}


def test_place_workers_engine_larger_than_its_node_begins_on_it(placed: Placed) -> None:
    placement = placed(config(tp=4, ray_placement_strategy="STRICT_SPREAD"))
    assert len(set(ips(placement))) == 4
    assert placement.bundles[0].node_id == ray_cluster.here()


def test_place_workers_large_engine_uses_all_nodes(placed: Placed) -> None:
    placement = placed(config(tp=7))
    nodes = [bundle.node_id for bundle in placement.bundles]
    assert nodes[:2] == [ray_cluster.here()] * 2
    assert len(set(nodes)) == 4
    assert [nodes.index(node) for node in nodes] == sorted(nodes.index(node) for node in nodes)  # node by node


def test_place_workers_engine_on_a_node_without_the_resource_uses_other_nodes(placed: Placed) -> None:
    placement = placed(config(tp=4, resources=FAR))
    assert sorted(ips(placement)) == ["127.0.0.2"] * 2 + ["127.0.0.3"] * 2
    assert ips(placement)[0] == ips(placement)[1]


@pytest.mark.parametrize(("strategy", "count"), [("STRICT_PACK", 1), ("STRICT_SPREAD", 2)])
def test_place_workers_follows_the_strategy(placed: Placed, strategy: str, count: int) -> None:
    placement = placed(config(tp=2, ray_placement_strategy=strategy))
    assert len({bundle.node_id for bundle in placement.bundles}) == count


@pytest.mark.parametrize(("names", "tp"), [(["127.0.0.3"], 2), (["127.0.0.3", "127.0.0.2"], 4)])
def test_place_workers_uses_only_ray_nodes(placed: Placed, names: list[str], tp: int) -> None:
    assert sorted(set(ips(placed(config(tp=tp, ray_nodes=names))))) == sorted(names)


def test_place_workers_ray_nodes_that_are_too_small_are_refused(placed: Placed) -> None:
    with pytest.raises(ClusterError, match=r"cannot hold 4 workers of \{acc: 1\}: node 127\.0\.0\.3 \(\w+\) has acc 2"):
        placed(config(tp=4, ray_nodes=["127.0.0.3"]))


def test_place_workers_uses_current_bundles_as_they_were_chosen(make_group: MakeGroup) -> None:
    group_id = make_group({"acc": 2.0}, ACC)
    placement = place_workers(
        new_engine(),
        config(tp=2),
        engine_node=ray_cluster.here(),
        context=inside(group_id, bundles=[0, 0]),
    )
    assert indices(placement) == [0, 0]


def test_place_workers_uses_gpus_where_the_cluster_has_them(placed: Placed) -> None:
    placement = placed(config(tp=3, resources={}, device="auto"))
    assert placement.size.bundle == {"GPU": 1.0}
    assert sorted(ips(placement)) == ["127.0.0.2", "127.0.0.2", "127.0.0.3"]


def test_place_workers_own_group_is_named_after_the_engine_and_removed() -> None:
    engine = new_engine()
    placement = place_workers(engine, config(), engine_node=ray_cluster.here(), context=None)
    entry = placement_group_table()[placement.group_id]
    assert entry["name"] == f"{engine.instance}/engine-0"
    placement.close()
    assert placement_group_table()[placement.group_id]["state"] == "REMOVED"
    placement.close()


def test_place_workers_given_group_is_found_by_id_and_by_name_and_stays(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group(ACC, ACC, name="mine")
    for wanted in (group_id, "mine"):
        placement = placed(config(tp=2, placement_group=wanted))
        assert placement.group_id == group_id
        placement.close()
        assert placement_group_table()[group_id]["state"] == "CREATED"


def test_place_workers_uses_the_current_group_unless_another_is_given(placed: Placed, make_group: MakeGroup) -> None:
    current, given = make_group(ACC), make_group(ACC)
    assert placed(config(), current).group_id == current
    assert placed(config(placement_group=given), current).group_id == given


def test_place_workers_in_a_given_group_begins_on_the_engines_node(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group(FAR, FAR, ON_HEAD, strategy="SPREAD")
    placement = placed(config(placement_group=group_id))
    assert placement.bundles[0].node_id == ray_cluster.here()


def test_place_workers_large_bundle_holds_several_workers(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group({"acc": 2.0}, {"acc": 2.0}, strategy="STRICT_SPREAD")
    placement = placed(config(tp=2, pp=2, placement_group=group_id))
    assert indices(placement) in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_place_workers_fractions_share_a_bundle(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group({"GPU": 1.0})
    assert indices(placed(config(tp=2, placement_group=group_id, resources={"GPU": 0.5}))) == [0, 0]


def test_place_workers_uses_bundle_indices_exactly(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group(ACC, ACC, ACC)
    assert indices(placed(config(tp=2, placement_group=group_id, bundle_indices=[2, 0]))) == [2, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [([0, 5], "there is no bundle 5; the placement group has 2"), ([0, 1], r"bundle 1 .*holds \{CPU: 1\}")],
)
def test_place_workers_bundle_indices_that_do_not_fit_are_refused(
    placed: Placed, make_group: MakeGroup, given: list[int], message: str
) -> None:
    group_id = make_group(ACC, {"CPU": 1.0})
    with pytest.raises((ClusterError, ConfigError), match=message):
        placed(config(tp=2, placement_group=group_id, bundle_indices=given))


def test_place_workers_bundle_indices_without_a_group_are_refused(placed: Placed) -> None:
    with pytest.raises(ConfigError, match="give one by `placement_group`"):
        placed(config(bundle_indices=[0]))


def test_place_workers_group_that_is_too_small_is_refused(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group(ACC)
    with pytest.raises(ClusterError, match="room for 1 of 2 workers"):
        placed(config(tp=2, placement_group=group_id))


def test_place_workers_group_without_the_resource_is_refused(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group({"CPU": 1.0})
    with pytest.raises(ClusterError, match="no bundle of the placement group holds acc"):
        placed(config(placement_group=group_id))


def test_place_workers_removed_group_is_refused(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group(ACC, name="gone")
    ray_cluster.remove(group_id)
    for wanted in (group_id, "gone"):
        with pytest.raises(ClusterError, match=rf"placement group '?{wanted}'? was removed already"):
            placed(config(placement_group=wanted))


def test_place_workers_unknown_group_is_refused(placed: Placed, make_group: MakeGroup) -> None:
    make_group(ACC, name="another")
    with pytest.raises(ClusterError, match=r"there is no placement group 'nosuch'; the cluster has another$"):
        placed(config(placement_group="nosuch"))


def test_place_workers_cluster_without_the_resources_is_refused_at_once_with_its_nodes(placed: Placed) -> None:
    with pytest.raises(ClusterError) as caught:
        placed(config(tp=4, resources={"GPU": 1.0}, ray_placement_timeout=1000.0))
    said = str(caught.value)
    assert "the cluster cannot hold 4 workers of {GPU: 1}" in said
    assert "node 127.0.0.2 " in said and "has GPU 2 free of 2" in said
    assert "node 127.0.0.4 " in said and "has GPU 0 free of 0" in said
    assert "`tensor_parallel_size` 2 would fit" in said


def test_place_workers_strict_pack_larger_than_every_node_is_refused(placed: Placed) -> None:
    with pytest.raises(ClusterError, match=r"all on one node \(STRICT_PACK\).*`tensor_parallel_size` 2 would fit"):
        placed(config(tp=4, ray_placement_strategy="STRICT_PACK"))


def test_place_workers_logs_that_it_waits_for_what_others_hold(
    placed: Placed, make_group: MakeGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "PROGRESS_SECONDS", 0.2)
    make_group(*[{"GPU": 1.0}] * 3)
    with caplog.at_level("INFO", "eagleray"), pytest.raises(ClusterError) as caught:
        placed(config(tp=2, resources={"GPU": 1.0}, ray_placement_timeout=1.0))
    assert "the cluster has them, but others hold a part" in str(caught.value)
    assert "waited 1 s (`ray_placement_timeout`)" in str(caught.value)
    assert any(re.match(r"waiting for [01] s: 2 workers of \{GPU: 1\}", message) for message in caplog.messages)


def test_place_workers_uses_what_others_release(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group(*[{"GPU": 1.0}] * 3)
    timer = Timer(0.3, ray_cluster.remove, [group_id])
    timer.start()
    placed(config(tp=3, resources={"GPU": 1.0}))
    timer.join()
