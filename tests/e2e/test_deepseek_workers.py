"""DeepSeek models through several workers give the tokens that one worker gives, and so transformers'."""

from __future__ import annotations

import pytest
from agreement import answers, assert_agree
from checkpoints import make_checkpoint

CASES = [
    pytest.param("deepseek_v2", {"tensor_parallel_size": 2}, marks=pytest.mark.grid),
    pytest.param("deepseek_v2", {"pipeline_parallel_size": 2}, marks=pytest.mark.grid),
    # test_executors_agree.py has two workers with this family, tests/unit/models/test_deepseek.py the same four ranks
    pytest.param("deepseek_v3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.grid),
    pytest.param(
        "deepseek_v3",
        {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_dispatch": "all-to-all"},
        marks=pytest.mark.grid,
    ),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {
        family: make_checkpoint(tmp_path_factory.mktemp(family), family) for family in ("deepseek_v2", "deepseek_v3")
    }


@pytest.mark.parametrize(("family", "options"), CASES)
def test_executors_deepseek_processes_agree(checkpoints, family, options):
    alone = answers(checkpoints[family], executor="in-process", async_scheduling=False)
    assert_agree(answers(checkpoints[family], executor="processes", **options), alone)
