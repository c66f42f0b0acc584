"""Token ids of all rows in one flat array, so that one index operation serves all rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Entries(NamedTuple):
    """Arrays [num_entries]. The entries of one owner are in the order in which they were given."""

    owners: IntArray
    """Rows in the table; logit indices in the result of `select`."""
    token_ids: IntArray
    values: FloatArray


class TokenTable:
    """Token ids of rows, each with a value (0 if none was given). The flat form is remade only after a change."""

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

    def select(self, logit_index_of_row: IntArray) -> Entries:
        """Return the entries of the rows that take part in a step, as (logit index, token id, value).

        `logit_index_of_row`: [num_rows] the index of each row's logits, -1 for a row that does not take part.
        """
        if self._flat is None:
            self._flat = self._flatten()
        indices = logit_index_of_row[self._flat.owners]
        selected = indices >= 0
        return Entries(indices[selected], self._flat.token_ids[selected], self._flat.values[selected])

    def _flatten(self) -> Entries:
        owners = [np.full(len(token_ids), row, dtype=np.int64) for row, (token_ids, _) in self._lists.items()]
        return Entries(
            np.concatenate([np.empty(0, np.int64), *owners]),
            np.concatenate([np.empty(0, np.int64), *(token_ids for token_ids, _ in self._lists.values())]),
            np.concatenate([np.empty(0, np.float32), *(values for _, values in self._lists.values())]),
        )
