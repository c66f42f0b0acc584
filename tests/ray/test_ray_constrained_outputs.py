"""Answers of workers on Ray under random JSON schemas and regular expressions follow them."""

from __future__ import annotations

import pytest
from constrained_outputs import OPTIONS, check_all
from ray_cluster import ACC

from eagleray import LLM


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_llm_on_ray_thousand_constraints_finished_answers_follow_them(cluster):
    options = {"executor": "ray", "ray_address": cluster, "ray_worker_resources": ACC, "num_kv_blocks": 512}
    with LLM(**OPTIONS, **options, tensor_parallel_size=2) as llm:
        check_all(llm)
