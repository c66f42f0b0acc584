"""The table of running requests, and the arrays of a forward pass that a plan makes of it.

Owned by the runner. The scheduler decides which request has which row; here a row is only an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from eagleray.kernels.forward_batch import AdapterGroups, ForwardBatch
from eagleray.messages.steps import NewRow, StepPlan

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Tokens that a step samples, one for each of `rows`, before the host knows them."""

    rows: IntArray
    positions: IntArray
    generations: IntArray
    """Generation of each row when it sampled, see `InputBatch.generation`."""


class InputBatch:
    """Tokens, cache blocks and progress of each request, in persistent arrays indexed by row."""

    def __init__(self, *, num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # np.zeros uses calloc, so only the rows that are used take memory.
        self.token_ids = np.zeros((num_rows, max_model_len + 1), dtype=np.int32)
        """Known tokens, and a negative mark for each that is not known yet, see `expect_tokens`."""
        self.block_table = np.zeros((num_rows, -(-max_model_len // block_size) + 1), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int64)
        """Number of tokens of prompt and output, including sampled tokens that the host does not know yet."""
        self.num_computed = np.zeros(num_rows, dtype=np.int64)
        """Number of the first tokens that are in the cache."""
        self.num_prompt = np.zeros(num_rows, dtype=np.int64)
        self.generation = np.zeros(num_rows, dtype=np.int64)
        """Number of requests that have had the row, so that a late token of an earlier one is recognized."""
        self.adapter_slots = np.full(num_rows, -1, dtype=np.int32)
        """Slot of each row's low-rank adapter, -1: none."""
        self.has_adapters = False
        """Whether any row has had an adapter so far."""
        self.num_used_blocks = 0
        """Highest block id that a row has had, plus 1."""
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)

    def add_row(self, new: NewRow) -> None:
        """Put a request into its row and overwrite the row's former content."""
        row, count = new.row, len(new.token_ids)
        self.generation[row] += 1
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.num_computed[row] = new.num_computed_tokens
        self.num_prompt[row] = new.num_prompt_tokens
        self.adapter_slots[row] = new.adapter_slot
        self.has_adapters |= new.adapter_slot >= 0
        self._num_blocks[row] = 0
        self.append_blocks(row, new.block_ids)

    def append_blocks(self, row: int, block_ids: list[int]) -> None:
        """Append blocks to the row's block table."""
        have = self._num_blocks[row]
        self.block_table[row, have : have + len(block_ids)] = block_ids
        self._num_blocks[row] = have + len(block_ids)
        self.num_used_blocks = max(self.num_used_blocks, 1 + max(block_ids, default=-1))

    def num_slots(self, row: int) -> int:
        """Return the number of tokens that the row's blocks hold."""
        return int(self._num_blocks[row]) * self.block_size

    def put_drafts(self, row: int, token_ids: Sequence[int]) -> None:
        """Put drafted tokens behind the row's known ones, of which they do not become a part."""
        known = self.num_tokens[row]
        self.token_ids[row, known : known + len(token_ids)] = token_ids

    def settle_drafts(self, row: int, token_ids: list[int]) -> None:
        """Append the tokens that the row's last step sampled by its drafts. All but the last one are computed."""
        self.put_drafts(row, token_ids)
        self.num_tokens[row] += len(token_ids)
        self.num_computed[row] = self.num_tokens[row] - 1

    def expect_tokens(self, rows: IntArray) -> ExpectedTokens:
        """Append a token that is not known yet to each of `rows` [n], without duplicates. `token_ids` holds -1 - row in
        its place: the number by which the device finds the last token that it has sampled for the row."""
        positions = self.num_tokens[rows]
        self.token_ids[rows, positions] = -1 - rows
        self.num_tokens[rows] = positions + 1
        return ExpectedTokens(rows, positions, self.generation[rows])

    def set_tokens(self, expected: ExpectedTokens, token_ids: IntArray) -> None:
        """Put the tokens [n] in their places, except in rows that another request has now."""
        rows, positions = expected.rows, expected.positions
        current = self.is_current(expected)
        if not current.all():
            rows, positions, token_ids = rows[current], positions[current], token_ids[current]
        self.token_ids[rows, positions] = token_ids

    def is_current(self, expected: ExpectedTokens) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that still belong to the request that sampled."""
        return self.generation[expected.rows] == expected.generations


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Batch of a step, and the positions of its rows in the batch. Rows that compute one token come first."""

    batch: ForwardBatch
    rows: IntArray
    """[num_rows] Rows in the order of the batch."""
    num_tokens: IntArray
    """[num_rows] Number of tokens that each row computes."""
    query_end_loc: IntArray
    """[num_rows] Index behind the row's last token in the batch."""
    sampling_indices: IntArray
    """Indices into `rows` of the rows whose last known token is computed in this step."""
    num_drafts: IntArray | None = None
    """[num_rows] Number of drafts among the tokens of each row; None if no row has any."""


def make_batch(
    rows: InputBatch, row_ids: IntArray, first: IntArray, counts: IntArray, *, last_tokens: Tensor | None = None
) -> ForwardBatch:
    """Return a batch of `counts` [n] tokens of each of `row_ids` [n], from the positions `first` [n] on. Rows with one
    token come first."""
    num_decodes = int(np.count_nonzero(counts == 1))
    seq_lens = first + counts
    query_end_loc = np.cumsum(counts)
    token_rows, positions = row_ids, first
    if num_decodes != len(row_ids):
        token_rows = np.repeat(row_ids, counts)
        positions = np.arange(query_end_loc[-1]) + np.repeat(seq_lens - query_end_loc, counts)

    block, offset = np.divmod(positions, rows.block_size)
    max_blocks = -(-int(seq_lens.max(initial=0)) // rows.block_size)
    query_start_loc = np.zeros(len(row_ids) + 1, dtype=np.int32)
    query_start_loc[1:] = query_end_loc
    return ForwardBatch(
        token_ids=rows.token_ids[token_rows, positions],
        positions=positions.astype(np.int32),
        slot_mapping=(rows.block_table[token_rows, block] * rows.block_size + offset).astype(np.int32),
        block_table=rows.block_table[row_ids, :max_blocks],
        seq_lens=seq_lens.astype(np.int32),
        query_start_loc=query_start_loc,
        num_decodes=num_decodes,
        last_tokens=last_tokens,
        adapters=AdapterGroups.of(rows.adapter_slots[token_rows]) if rows.has_adapters else None,
    )


def build_inputs(plan: StepPlan, rows: InputBatch, last_tokens: Tensor | None = None) -> StepInputs:
    """Return the inputs of `plan`, which may have no rows. Reads `rows` without changing it. `last_tokens`: see
    `ForwardBatch`."""
    row_ids = np.array(plan.rows, dtype=np.int64)
    if plan.total_num_tokens == len(plan.rows) and not plan.drafts:
        return _decode_inputs(rows, row_ids, last_tokens)
    counts = np.array(plan.num_tokens, dtype=np.int64)
    num_decodes = int(np.count_nonzero(counts == 1))
    if num_decodes != len(row_ids):
        order = np.argsort(counts != 1, kind="stable")
        row_ids, counts = row_ids[order], counts[order]
    batch = make_batch(rows, row_ids, rows.num_computed[row_ids], counts, last_tokens=last_tokens)
    seq_lens, query_end_loc = rows.num_computed[row_ids] + counts, np.cumsum(counts)
    num_known, num_drafts = seq_lens, None
    if plan.drafts:
        num_drafts = np.array([len(plan.drafts.get(row, ())) for row in row_ids.tolist()], dtype=np.int64)
        num_known = seq_lens - num_drafts
    sampling_indices = np.flatnonzero(num_known == rows.num_tokens[row_ids])
    return StepInputs(batch, row_ids, counts, query_end_loc, sampling_indices, num_drafts)


def _decode_inputs(rows: InputBatch, row_ids: IntArray, last_tokens: Tensor | None) -> StepInputs:
    """Return the inputs of a step that computes one token of each of `row_ids` [n]. The batch is that of `make_batch`,
    by a third of its operations, because most steps are of this kind."""
    num_rows, first = len(row_ids), rows.num_computed[row_ids]
    seq_lens, blocks = first + 1, first // rows.block_size
    max_blocks = int(blocks.max(initial=-1)) + 1
    block_table = rows.block_table[row_ids, :max_blocks]
    slots = rows.block_table[row_ids, blocks] * rows.block_size + (first - blocks * rows.block_size)
    starts = np.arange(num_rows + 1)
    is_last = seq_lens == rows.num_tokens[row_ids]
    batch = ForwardBatch(
        token_ids=rows.token_ids[row_ids, first],
        positions=first.astype(np.int32),
        slot_mapping=slots.astype(np.int32),
        block_table=block_table,
        seq_lens=seq_lens.astype(np.int32),
        query_start_loc=starts.astype(np.int32),
        num_decodes=num_rows,
        last_tokens=last_tokens,
        adapters=AdapterGroups.of(rows.adapter_slots[row_ids]) if rows.has_adapters else None,
    )
    sampling_indices = starts[:-1] if is_last.all() else np.flatnonzero(is_last)
    return StepInputs(batch, row_ids, np.ones(num_rows, dtype=np.int64), starts[1:], sampling_indices)


def token_indices_of(rows: Sequence[int], inputs: StepInputs) -> IntArray:
    """Return the indices of these rows' tokens in the batch, in the order of `rows`."""
    order = np.argsort(inputs.rows)
    indices = order[np.searchsorted(inputs.rows, np.array(rows, dtype=np.int64), sorter=order)]
    counts = inputs.num_tokens[indices]
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(inputs.query_end_loc[indices] - ends, counts)
