"""From a plan and the rows to the tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from eagleray.messages.steps import StepPlan
from eagleray.models.batch import Batch
from eagleray.worker.rows import IntArray, Rows

__all__ = ["StepInputs", "build_inputs"]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's batch, rows with one token first, and where its rows lie in it."""

    batch: Batch
    rows: IntArray
    """[num_rows] the row of each line of the batch"""
    num_tokens: IntArray
    """[num_rows] tokens that each computes"""
    ends: IntArray
    """[num_rows] index behind the row's last token in the batch"""
    samples: IntArray
    """Indices into `rows` of those whose last known token is computed in this step."""


def build_inputs(plan: StepPlan, rows: Rows, device: torch.device) -> StepInputs:
    """The inputs of `plan`. Reads the rows, changes nothing."""
    row_ids = np.array(plan.rows, dtype=np.int64)
    counts = np.array(plan.num_tokens, dtype=np.int64)
    order = np.argsort(counts != 1, kind="stable")
    row_ids, counts = row_ids[order], counts[order]
    starts = rows.num_computed[row_ids]
    contexts = starts + counts
    ends = np.cumsum(counts)

    owner = np.repeat(np.arange(len(row_ids)), counts)  # [num_tokens] line of the batch that each token belongs to
    positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + starts[owner]
    token_rows = row_ids[owner]
    blocks = rows.block_table[token_rows, positions // rows.block_size].astype(np.int64)
    max_blocks = -(-int(contexts.max()) // rows.block_size)

    def tensor(array: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)

    batch = Batch(
        token_ids=tensor(rows.token_ids[token_rows, positions]),
        positions=tensor(positions),
        slots=tensor(blocks * rows.block_size + positions % rows.block_size),
        block_table=tensor(rows.block_table[row_ids, :max_blocks]),
        context_lens=contexts.tolist(),
        query_lens=counts.tolist(),
        num_decodes=int((counts == 1).sum()),
    )
    samples = np.flatnonzero(contexts == rows.num_tokens[row_ids])
    return StepInputs(batch=batch, rows=row_ids, num_tokens=counts, ends=ends, samples=samples)
