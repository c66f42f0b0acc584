"""Lists of token ids that rows bring along, laid end to end.

One index operation then serves all rows of a step, however many ids each has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Entries(NamedTuple):
    """Flat, [num_entries] each; those of one owner in the order in which they were given."""

    owners: IntArray
    """Rows of the table; lines of the logits in what `select` returns."""
    token_ids: IntArray
    values: FloatArray


class TokenTable:
    """Token ids of rows, each with a value where there is one to it. The flat form is made anew only after a change."""

    def __init__(self) -> None:
        self._lists: dict[int, tuple[IntArray, FloatArray]] = {}
        self._flat: Entries | None = None

    def put(self, row: int, token_ids: Sequence[int], values: Sequence[float] | None = None) -> None:
        ids = np.array(token_ids, dtype=np.int64)
        self._lists[row] = (ids, np.zeros(len(ids), np.float32) if values is None else np.array(values, np.float32))
        self._flat = None

    def discard(self, row: int) -> None:
        if self._lists.pop(row, None) is not None:
            self._flat = None

    def select(self, line_of: IntArray) -> Entries:
        """The entries of the rows that take part in a step, as (line, token id, value).

        `line_of`: [num_rows] the line of each row, -1 for a row that does not take part.
        """
        if self._flat is None:
            self._flat = self._flatten()
        lines = line_of[self._flat.owners]
        here = lines >= 0
        return Entries(lines[here], self._flat.token_ids[here], self._flat.values[here])

    def _flatten(self) -> Entries:
        owners = [np.full(len(token_ids), row, dtype=np.int64) for row, (token_ids, _) in self._lists.items()]
        return Entries(
            np.concatenate([np.empty(0, np.int64), *owners]),
            np.concatenate([np.empty(0, np.int64), *(token_ids for token_ids, _ in self._lists.values())]),
            np.concatenate([np.empty(0, np.float32), *(values for _, values in self._lists.values())]),
        )
