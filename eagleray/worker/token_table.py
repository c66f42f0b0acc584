"""Lists of token ids that rows bring along, laid end to end.

One index operation then serves all rows of a step, however many ids each has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Entries", "IntArray", "TokenTable"]

IntArray = npt.NDArray[np.integer[Any]]


class Entries(NamedTuple):
    """Flat, [num_entries] each, in order of owner."""

    owners: IntArray
    """Rows of the table; lines of the logits in what `select` returns."""
    token_ids: IntArray
    values: npt.NDArray[np.float32]


class TokenTable:
    """Token ids of rows, each with a value where there is one to it. The flat form is made anew only after a change."""

    def __init__(self) -> None:
        self._lists: dict[int, tuple[Sequence[int], Sequence[float]]] = {}
        self._flat: Entries | None = None

    def put(self, row: int, token_ids: Sequence[int], values: Sequence[float] | None = None) -> None:
        self._lists[row] = (token_ids, [0.0] * len(token_ids) if values is None else values)
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
        lengths = [len(token_ids) for token_ids, _ in self._lists.values()]
        return Entries(
            np.repeat(np.fromiter(self._lists, dtype=np.int64), lengths),
            np.array([token for token_ids, _ in self._lists.values() for token in token_ids], dtype=np.int64),
            np.array([value for _, values in self._lists.values() for value in values], dtype=np.float32),
        )
