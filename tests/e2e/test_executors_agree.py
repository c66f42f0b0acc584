"""Equal tokens and log-probabilities for every kind and number of workers."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from agreement import answers, assert_agree
from checkpoints import FAMILIES, make_checkpoint

from eagleray.config.resolve import DEMO_MODEL_DIR

# (family, tensor parallel, pipeline parallel, asynchronous): one step at a time; `EXPERTS` has steps ahead, and
# `test_speculation.py` stages of a pipeline. The grid has the other combinations.
COMBINATIONS = [("qwen3", 2, 1, False)]
# (family, tensor parallel, pipeline parallel, how tokens come to experts that are divided among the workers)
EXPERTS = [
    ("qwen3_moe", 2, 1, "all-reduce"),
    pytest.param("qwen3_moe", 2, 1, "all-to-all", marks=pytest.mark.grid),  # as with experts that move
    ("deepseek_v3", 2, 1, "all-gather"),
    pytest.param("mixtral", 2, 2, "all-to-all", marks=pytest.mark.grid),
]
GRID = [
    (family, tp, pp, ahead)
    for family in FAMILIES
    for tp in (1, 2)
    for pp in (1, 2)
    for ahead in (False, True)
    if (family, tp, pp, ahead) not in COMBINATIONS
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return, by family, the checkpoint and the answers of one worker in this process, one step at a time."""

    @functools.cache
    def find(family: str):
        checkpoint = make_checkpoint(tmp_path_factory.mktemp(family), family)
        return checkpoint, answers(checkpoint, executor="in-process", async_scheduling=False)

    return find


def check(expected, family: str, tp: int, pp: int, ahead: bool, **options) -> None:
    checkpoint: Path
    checkpoint, answer = expected(family)
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    assert_agree(answers(checkpoint, executor="processes", async_scheduling=ahead, **sizes, **options), answer)


@pytest.mark.parametrize(("family", "tp", "pp", "ahead"), COMBINATIONS)
def test_executors_processes_agree(expected, family, tp, pp, ahead):
    check(expected, family, tp, pp, ahead)


@pytest.mark.parametrize(("family", "tp", "pp", "dispatch"), EXPERTS)
def test_executors_processes_expert_parallel_agree(expected, family, tp, pp, dispatch):
    check(expected, family, tp, pp, True, enable_expert_parallel=True, expert_dispatch=dispatch)


def test_executors_moving_experts_agree(expected):
    """Experts move often, with room for copies."""
    options = {"enable_eplb": True, "eplb_step_interval": 4, "num_redundant_experts": 2}
    check(expected, "qwen3_moe", 2, 1, True, enable_expert_parallel=True, expert_dispatch="all-to-all", **options)


@pytest.mark.grid
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_executors_processes_with_embedded_model_agree(tp, pp, backend):
    options = {"dtype": "float32", "structured_outputs_backend": backend}
    alone = answers(DEMO_MODEL_DIR, executor="in-process", async_scheduling=False, **options)
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    assert_agree(answers(DEMO_MODEL_DIR, executor="processes", **sizes, **options), alone)


@pytest.mark.grid
@pytest.mark.parametrize(("family", "tp", "pp", "ahead"), GRID)
def test_executors_processes_every_combination_agree(expected, family, tp, pp, ahead):
    check(expected, family, tp, pp, ahead)
