"""Topology of an engine's workers, and the GPU that each uses."""

from __future__ import annotations

import pytest

from eagleray.cluster.actor_process import ActorInfo
from eagleray.cluster.worker_actors import device_index, resolve_topology, warn_of_network
from eagleray.config.build import build_config
from eagleray.config.sections import Config, ExecutionConfig, ParallelConfig
from eagleray.errors import ClusterError


def info(node: str, gpus: list[str], visible: str | None = None) -> ActorInfo:
    return ActorInfo(
        node_id=node,
        hostname=node,
        pid=1,
        accelerator_ids=gpus,
        visible_devices=visible,
        niceness=0,
        versions={},
    )


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [
        ([], None, None),
        ([], "0,1", None),
        (["2"], None, 2),
        (["3", "1"], None, 3),
        (["5"], "4,5", 1),  # the raylet itself was given two of eight
        (["GPU-b"], "GPU-a, GPU-b", 1),
    ],
)
def test_device_index_is_the_position_of_the_assigned_gpu(
    assigned: list[str], visible: str | None, index: int | None
) -> None:
    assert device_index(assigned, visible) == index


@pytest.mark.parametrize("visible", ["0,1", ""])
def test_device_index_gpu_that_the_process_does_not_see_is_refused(visible: str) -> None:
    with pytest.raises(ClusterError, match="Ray assigned GPU 2 to a worker"):
        device_index(["2"], visible)


def test_resolve_topology_ranks_keep_the_order_of_the_actors() -> None:
    config = Config(parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2))
    infos = [info("b", ["1"]), info("b", ["0"]), info("a", ["0"]), info("c", ["7"])]
    topology, devices = resolve_topology(config, infos, {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"})
    assert topology.nodes == ["b", "b", "a", "c"]
    assert topology.addresses == ["10.0.0.2", "10.0.0.2", "10.0.0.1", "10.0.0.3"]
    assert devices == [1, 0, 0, 7]


def test_resolve_topology_nodes_with_one_address_are_two() -> None:
    config = Config(parallel=ParallelConfig(tensor_parallel_size=2))
    topology, _ = resolve_topology(config, [info("a", []), info("b", [])], {"a": "10.0.0.1", "b": "10.0.0.1"})
    assert topology.local_ranks(0) == [0]


def test_resolve_topology_without_assigned_gpus_workers_of_a_node_use_one_each() -> None:
    config = Config(parallel=ParallelConfig(tensor_parallel_size=3), execution=ExecutionConfig(device="cuda"))
    infos = [info("a", []), info("a", []), info("b", [])]
    assert resolve_topology(config, infos, {"a": "1", "b": "2"})[1] == [0, 1, 0]


@pytest.mark.parametrize(
    ("nodes", "strategy", "said"),
    [
        (["a", "a", "b", "b"], "PACK", None),
        (["a", "a", "b", "c"], "PACK", "the 2 workers of a tensor-parallel group are on 2 nodes (ip-b (b), ip-c (c))"),
        (["a", "b", "c", "d"], "SPREAD", None),
    ],
)
def test_warn_of_network_names_the_nodes_of_a_straddling_stage(
    nodes: list[str], strategy: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = build_config(
        tensor_parallel_size=2, pipeline_parallel_size=2, executor="ray", ray_placement_strategy=strategy
    )
    topology, _ = resolve_topology(config, [info(node, []) for node in nodes], {node: f"ip-{node}" for node in nodes})
    warn_of_network("engine-0", config, topology)
    assert said is None or said in caplog.text
    assert bool(caplog.text) == (said is not None)
