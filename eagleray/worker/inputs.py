"""From a plan and the rows to the arrays of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.messages.steps import StepPlan
from eagleray.worker.input_batch import InputBatch, IntArray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's batch, rows with one token first, and where its rows lie in it."""

    batch: ForwardBatch
    rows: IntArray
    """[num_rows] the row of each line of the batch"""
    num_tokens: IntArray
    """[num_rows] tokens that each computes"""
    ends: IntArray
    """[num_rows] index behind the row's last token in the batch"""
    samples: IntArray
    """Indices into `rows` of those whose last known token is computed in this step."""


def build_inputs(plan: StepPlan, rows: InputBatch) -> StepInputs:
    """The inputs of `plan`, which may have no rows. Reads the rows, changes nothing."""
    row_ids = np.array(plan.rows, dtype=np.int64)
    counts = np.array(plan.num_tokens, dtype=np.int64)
    num_decodes = int(np.count_nonzero(counts == 1))
    if num_decodes != len(row_ids):
        order = np.argsort(counts != 1, kind="stable")
        row_ids, counts = row_ids[order], counts[order]
    first = rows.num_computed[row_ids]
    contexts = first + counts
    ends = np.cumsum(counts)
    token_rows, positions = row_ids, first
    if num_decodes != len(row_ids):
        token_rows = np.repeat(row_ids, counts)
        positions = np.arange(ends[-1]) + np.repeat(contexts - ends, counts)

    block, offset = np.divmod(positions, rows.block_size)
    max_blocks = -(-int(contexts.max(initial=0)) // rows.block_size)
    starts = np.zeros(len(row_ids) + 1, dtype=np.int32)
    starts[1:] = ends
    batch = ForwardBatch(
        token_ids=rows.token_ids[token_rows, positions],
        positions=positions.astype(np.int32),
        slot_mapping=(rows.block_table[token_rows, block] * rows.block_size + offset).astype(np.int32),
        block_table=rows.block_table[row_ids, :max_blocks],
        seq_lens=contexts.astype(np.int32),
        query_start_loc=starts,
        num_decodes=num_decodes,
    )
    samples = np.flatnonzero(contexts == rows.num_tokens[row_ids])
    return StepInputs(batch=batch, rows=row_ids, num_tokens=counts, ends=ends, samples=samples)


def token_indices_of(rows: Sequence[int], inputs: StepInputs) -> IntArray:
    """Where the tokens of these rows are in the batch: [tokens of the rows], in the order of `rows`."""
    order = np.argsort(inputs.rows)
    places = order[np.searchsorted(inputs.rows, np.array(rows, dtype=np.int64), sorter=order)]
    counts = inputs.num_tokens[places]
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(inputs.ends[places] - ends, counts)
