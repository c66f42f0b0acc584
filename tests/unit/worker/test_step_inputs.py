"""The inputs of steps in which every row computes one token: the same arrays as those of any other step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import NewRow, StepPlan
from eagleray.worker.input_batch import InputBatch, build_inputs, make_batch

BLOCK = 4
NUM_ROWS = 6
RNG = np.random.default_rng(0)


@pytest.fixture
def rows():
    """Rows with 1 to 21 tokens, of which all but the last one are computed, except in row 3."""
    table = InputBatch(num_rows=NUM_ROWS, max_model_len=32, block_size=BLOCK)
    for row, count in enumerate([1, 4, 5, 12, 21, 8]):
        blocks = (10 * row + np.arange(-(-count // BLOCK) + 1)).tolist()
        table.add_row(
            NewRow(
                row=row,
                request_id=str(row),
                token_ids=RNG.integers(0, 100, count).tolist(),
                num_prompt_tokens=count,
                num_computed_tokens=count - (4 if row == 3 else 1),
                block_ids=blocks,
                sampling=Sampling(seed=0),
            )
        )
    return table


def plan_of(row_ids):
    return StepPlan(step=1, freed_rows=[], new_rows=[], new_blocks=[], rows=row_ids, num_tokens=[1] * len(row_ids))


def same(one, other):
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.flags.c_contiguous and np.array_equal(one, other)
    return one is other or one == other


@pytest.mark.parametrize("row_ids", [[4], [0, 1, 2, 4, 5], [5, 3, 0], []])
def test_decode_inputs_equal_those_of_any_batch(rows, row_ids):
    inputs = build_inputs(plan_of(row_ids), rows)
    ids = np.array(row_ids, dtype=np.int64)
    batch = make_batch(rows, ids, rows.num_computed[ids], np.ones(len(ids), dtype=np.int64))
    names = {field.name for field in dataclasses.fields(batch)} - {"numbers"}
    assert [name for name in names if not same(getattr(inputs.batch, name), getattr(batch, name))] == []
    assert inputs.rows.tolist() == row_ids and inputs.num_tokens.tolist() == [1] * len(ids)
    assert inputs.query_end_loc.tolist() == list(range(1, len(ids) + 1))
    assert inputs.num_drafts is None


def test_decode_inputs_row_with_tokens_left_does_not_sample(rows):
    assert build_inputs(plan_of([4, 3, 0]), rows).sampling_indices.tolist() == [0, 2]
    assert build_inputs(plan_of([4, 0]), rows).sampling_indices.tolist() == [0, 1]


def test_decode_inputs_last_tokens_and_adapters_are_in_the_batch(rows):
    last_tokens = torch.zeros(NUM_ROWS)
    rows.has_adapters, rows.adapter_slots[1] = True, 2
    batch = build_inputs(plan_of([0, 1]), rows, last_tokens).batch
    assert batch.last_tokens is last_tokens
    assert batch.adapters is not None and batch.adapters.slots.tolist() == [2] and batch.adapters.tokens.tolist() == [1]
