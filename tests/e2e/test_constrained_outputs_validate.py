"""Answers under random JSON schemas and regular expressions follow them, whatever computes them."""

from __future__ import annotations

import pytest
from constrained_outputs import OPTIONS, check_all, check_regexes, check_schemas

from eagleray import LLM


def test_llm_random_constraints_finished_answers_follow_them():
    with LLM(**OPTIONS) as llm:
        assert check_schemas(llm, range(14)) > 5
        assert check_regexes(llm, range(6)) > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [None, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_llm_thousand_constraints_finished_answers_follow_them(size):
    with LLM(**OPTIONS, **({} if size is None else {size: 2})) as llm:
        check_all(llm, num_seeds=3 if size is None else 1)
