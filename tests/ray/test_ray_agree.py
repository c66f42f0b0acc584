"""Equal tokens and log-probabilities on Ray: by the queue and by a compiled graph, local and remote."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from agreement import answers, assert_agree
from checkpoints import make_checkpoint
from ray_cluster import ACC, FAR

# (executor, family, tensor parallel, pipeline parallel, asynchronous, resource): each executor and each family, with
# tensor and pipeline parallelism, and with and without steps ahead. The grid has the other combinations.
# FAR: workers on two other nodes, reached by TCP; tensors between them go by gloo.
PAIRS = [
    ("ray", "qwen3", 2, 2, True, FAR),
    ("ray-graph", "qwen3_moe", 2, 1, False, FAR),
]
GRID = [
    (executor, family, tp, pp, ahead, resource)
    for executor in ("ray", "ray-graph")
    for family in ("qwen3", "qwen3_moe")
    for tp in (1, 2)
    for pp in (1, 2)
    for ahead in (False, True)
    for resource in (ACC, FAR)
    if (executor, family, tp, pp, ahead, resource) not in PAIRS
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return a function: family -> the checkpoint, and the answers of one worker in this process, step by step."""

    @functools.cache
    def find(family: str):
        checkpoint = make_checkpoint(tmp_path_factory.mktemp(family), family)
        return checkpoint, answers(checkpoint, executor="in-process", async_scheduling=False)

    return find


def check(expected, executor: str, family: str, tp: int, pp: int, ahead: bool, resource: dict[str, float]) -> None:
    checkpoint: Path
    checkpoint, answer = expected(family)
    found = answers(
        checkpoint,
        executor=executor,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        async_scheduling=ahead,
        ray_worker_resources=resource,
        ray_placement_timeout=20,
    )
    assert_agree(found, answer)


@pytest.mark.parametrize(("executor", "family", "tp", "pp", "ahead", "resource"), PAIRS)
def test_ray_executors_pairs_agree_with_one_worker(cluster, expected, executor, family, tp, pp, ahead, resource):
    check(expected, executor, family, tp, pp, ahead, resource)


@pytest.mark.grid
@pytest.mark.parametrize(("executor", "family", "tp", "pp", "ahead", "resource"), GRID)
def test_ray_executors_every_combination_agrees_with_one_worker(
    cluster, expected, executor, family, tp, pp, ahead, resource
):
    check(expected, executor, family, tp, pp, ahead, resource)
