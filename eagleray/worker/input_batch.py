"""The table of running requests: known tokens, cache blocks and progress of each row.

Owned by the runner. The scheduler decides which request has which row; here a row is just an index.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eagleray.messages.steps import NewRow

IntArray = npt.NDArray[np.integer[Any]]


class InputBatch:
    """Persistent arrays, indexed by row."""

    def __init__(self, *, num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # calloc'd: memory is taken only by what rows really use
        self.token_ids = np.zeros((num_rows, max_model_len + 1), dtype=np.int32)
        self.block_table = np.zeros((num_rows, -(-max_model_len // block_size) + 1), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int64)
        """Known tokens: the prompt and what was sampled."""
        self.num_computed = np.zeros(num_rows, dtype=np.int64)
        """The first this many of them are in the cache."""
        self.num_prompt = np.zeros(num_rows, dtype=np.int64)
        self.generation = np.zeros(num_rows, dtype=np.int64)
        """How many requests have had the row: news for an earlier one must not reach the present one."""
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)

    def start(self, start: NewRow) -> None:
        """A request takes the row; whatever was in it is overwritten."""
        row, count = start.row, len(start.token_ids)
        self.generation[row] += 1
        self.token_ids[row, :count] = start.token_ids
        self.num_tokens[row] = count
        self.num_computed[row] = start.num_computed_tokens
        self.num_prompt[row] = start.num_prompt_tokens
        self._num_blocks[row] = 0
        self.grow(row, start.block_ids)

    def grow(self, row: int, block_ids: list[int]) -> None:
        """Append blocks to the row's block table."""
        have = self._num_blocks[row]
        self.block_table[row, have : have + len(block_ids)] = block_ids
        self._num_blocks[row] = have + len(block_ids)

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """Each of `rows` knows one more token. Shapes [n], rows without duplicates."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
