"""Where an engine's workers are put, on one to four nodes. No actor is made here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Timer

import pytest
import ray_cluster
from ray.util.placement_group import placement_group_table
from ray_cluster import ACC, FAR, MakeGroup, config, new_engine

from eagleray.cluster import deadline
from eagleray.cluster.placement import Placement, place
from eagleray.config.sections import Config
from eagleray.errors import ClusterError, ConfigError

NEAR = {"acc": 1.0, "node:__internal_head__": 0.001}


class Placed:
    """Places engines as an engine does; closes what it made in the end."""

    def __init__(self, ends: ExitStack) -> None:
        self._ends = ends

    def __call__(self, config: Config, current_group: str | None = None) -> Placement:
        placement = place(new_engine(), config, engine_node=ray_cluster.here(), current_group=current_group)
        self._ends.callback(placement.close)
        return placement


@pytest.fixture
def placed() -> Iterator[Placed]:
    with ExitStack() as ends:
        yield Placed(ends)


def ips(placement: Placement) -> list[str]:
    return [ray_cluster.node_ips()[bundle.node_id] for bundle in placement.bundles]


def indices(placement: Placement) -> list[int]:
    return [bundle.index for bundle in placement.bundles]


def test_workers_that_fit_beside_the_engine_are_put_there(placed: Placed) -> None:
    placement = placed(config(tp=2))
    assert {bundle.node_id for bundle in placement.bundles} == {ray_cluster.here()}


def test_an_engine_larger_than_its_node_begins_on_it(placed: Placed) -> None:
    placement = placed(config(tp=4, ray_placement_strategy="STRICT_SPREAD"))
    assert len(set(ips(placement))) == 4
    assert placement.bundles[0].node_id == ray_cluster.here()


def test_an_engine_may_take_all_nodes(placed: Placed) -> None:
    placement = placed(config(tp=7))
    nodes = [bundle.node_id for bundle in placement.bundles]
    assert nodes[:2] == [ray_cluster.here()] * 2
    assert len(set(nodes)) == 4
    assert [nodes.index(node) for node in nodes] == sorted(nodes.index(node) for node in nodes)  # node by node


def test_an_engine_on_a_node_without_the_resource_gets_workers_elsewhere(placed: Placed) -> None:
    placement = placed(config(tp=4, resources=FAR))
    assert sorted(ips(placement)) == ["127.0.0.2"] * 2 + ["127.0.0.3"] * 2
    assert ips(placement)[0] == ips(placement)[1]


@pytest.mark.parametrize(("strategy", "count"), [("STRICT_PACK", 1), ("STRICT_SPREAD", 2)])
def test_the_strategy_is_the_users(placed: Placed, strategy: str, count: int) -> None:
    placement = placed(config(tp=2, ray_placement_strategy=strategy))
    assert len({bundle.node_id for bundle in placement.bundles}) == count


@pytest.mark.parametrize(("names", "tp"), [(["127.0.0.3"], 2), (["127.0.0.3", "127.0.0.2"], 4)])
def test_only_nodes_that_were_named_are_used(placed: Placed, names: list[str], tp: int) -> None:
    assert sorted(set(ips(placed(config(tp=tp, ray_nodes=names))))) == sorted(names)


def test_named_nodes_that_are_too_small_are_refused(placed: Placed) -> None:
    with pytest.raises(ClusterError, match=r"cannot hold 4 workers of \{acc: 1\}: node 127\.0\.0\.3 \(\w+\) has acc 2"):
        placed(config(tp=4, ray_nodes=["127.0.0.3"]))


def test_the_share_of_a_given_group_is_taken_as_it_was_decided(make_group: MakeGroup) -> None:
    group_id = make_group({"acc": 2.0}, ACC)
    placement = place(
        new_engine(),
        config(tp=2),
        engine_node=ray_cluster.here(),
        current_group=group_id,
        current_bundles=[0, 0],
    )
    assert indices(placement) == [0, 0]


def test_gpus_are_taken_where_the_cluster_has_them(placed: Placed) -> None:
    placement = placed(config(tp=3, resources={}, device="auto"))
    assert placement.worker == {"GPU": 1.0}
    assert sorted(ips(placement)) == ["127.0.0.2", "127.0.0.2", "127.0.0.3"]


def test_an_own_group_is_named_after_the_engine_and_removed() -> None:
    engine = new_engine()
    placement = place(engine, config(), engine_node=ray_cluster.here(), current_group=None)
    entry = placement_group_table()[placement.group_id]
    assert entry["name"] == f"{engine.instance}/engine-0"
    placement.close()
    assert placement_group_table()[placement.group_id]["state"] == "REMOVED"
    placement.close()


def test_a_given_group_is_found_by_id_and_by_name_and_stays(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group(ACC, ACC, name="mine")
    for wanted in (group_id, "mine"):
        placement = placed(config(tp=2, placement_group=wanted))
        assert placement.group_id == group_id
        placement.close()
        assert placement_group_table()[group_id]["state"] == "CREATED"


def test_the_current_group_is_used_unless_another_is_given(placed: Placed, make_group: MakeGroup) -> None:
    current, given = make_group(ACC), make_group(ACC)
    assert placed(config(), current).group_id == current
    assert placed(config(placement_group=given), current).group_id == given


def test_ranks_of_a_given_group_begin_on_the_engines_node(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group(FAR, FAR, NEAR, strategy="SPREAD")
    placement = placed(config(placement_group=group_id))
    assert placement.bundles[0].node_id == ray_cluster.here()


def test_a_bundle_of_several_workers(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group({"acc": 2.0}, {"acc": 2.0}, strategy="STRICT_SPREAD")
    placement = placed(config(tp=2, pp=2, placement_group=group_id))
    assert indices(placement) in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_fractions_of_a_resource(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group({"GPU": 1.0})
    assert indices(placed(config(tp=2, placement_group=group_id, resources={"GPU": 0.5}))) == [0, 0]


def test_bundle_indices_are_exact(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group(ACC, ACC, ACC)
    assert indices(placed(config(tp=2, placement_group=group_id, bundle_indices=[2, 0]))) == [2, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [([0, 5], "there is no bundle 5; the placement group has 2"), ([0, 1], r"bundle 1 .*holds \{CPU: 1\}")],
)
def test_bundle_indices_that_do_not_fit_the_group(
    placed: Placed, make_group: MakeGroup, given: list[int], message: str
) -> None:
    group_id = make_group(ACC, {"CPU": 1.0})
    with pytest.raises((ClusterError, ConfigError), match=message):
        placed(config(tp=2, placement_group=group_id, bundle_indices=given))


def test_bundle_indices_without_a_group(placed: Placed) -> None:
    with pytest.raises(ConfigError, match="give one by `placement_group`"):
        placed(config(bundle_indices=[0]))


def test_a_group_that_is_too_small(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group(ACC)
    with pytest.raises(ClusterError, match="room for 1 of 2 workers"):
        placed(config(tp=2, placement_group=group_id))


def test_a_group_without_the_resource(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group({"CPU": 1.0})
    with pytest.raises(ClusterError, match="no bundle of the placement group holds acc"):
        placed(config(placement_group=group_id))


def test_a_group_that_was_removed(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group(ACC, name="gone")
    ray_cluster.remove(group_id)
    for wanted in (group_id, "gone"):
        with pytest.raises(ClusterError, match=rf"placement group '?{wanted}'? was removed already"):
            placed(config(placement_group=wanted))


def test_a_group_that_never_was(placed: Placed, make_group: MakeGroup) -> None:
    make_group(ACC, name="another")
    with pytest.raises(ClusterError, match=r"there is no placement group 'nosuch'; the cluster has another$"):
        placed(config(placement_group="nosuch"))


def test_what_the_cluster_has_not_got_is_refused_at_once_with_what_it_has(placed: Placed) -> None:
    with pytest.raises(ClusterError) as caught:
        placed(config(tp=4, resources={"GPU": 1.0}, ray_placement_timeout=1000.0))
    said = str(caught.value)
    assert "the cluster cannot hold 4 workers of {GPU: 1}" in said
    assert "node 127.0.0.2 " in said and "has GPU 2 free of 2" in said
    assert "node 127.0.0.4 " in said and "has GPU 0 free of 0" in said
    assert "`tensor_parallel_size` 2 would fit" in said


def test_what_no_single_node_has_is_refused_under_strict_pack(placed: Placed) -> None:
    with pytest.raises(ClusterError, match=r"all on one node \(STRICT_PACK\).*`tensor_parallel_size` 2 would fit"):
        placed(config(tp=4, ray_placement_strategy="STRICT_PACK"))


def test_what_others_hold_is_waited_for_visibly(
    placed: Placed, make_group: MakeGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "PROGRESS_SECONDS", 0.2)
    make_group(*[{"GPU": 1.0}] * 3)
    with caplog.at_level("INFO", "eagleray"), pytest.raises(ClusterError) as caught:
        placed(config(tp=2, resources={"GPU": 1.0}, ray_placement_timeout=1.0))
    assert "the cluster has them, but others hold a part" in str(caught.value)
    assert "waited 1 s (`ray_placement_timeout`)" in str(caught.value)
    assert any(re.match(r"waiting for [01] s: 2 workers of \{GPU: 1\}", message) for message in caplog.messages)


def test_what_others_release_is_taken(placed: Placed, make_group: MakeGroup) -> None:
    group_id = make_group(*[{"GPU": 1.0}] * 3)
    timer = Timer(0.3, ray_cluster.remove, [group_id])
    timer.start()
    placed(config(tp=3, resources={"GPU": 1.0}))
    timer.join()
