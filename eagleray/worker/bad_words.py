"""Token sequences that must not be generated.

The last token of a sequence is forbidden if the tokens before it are the ones generated last. As in vLLM the prompt
does not count: a sequence that begins in the prompt may be completed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagleray.worker.token_table import IntArray

NOTHING = -1
"""Stands for a generated token before there is one: equal to no token."""
ANY = -2
"""Stands for a token of a prefix that is shorter than the longest one: equal to every token."""


class BadWords:
    """Sequences of all rows, and the tokens that these rows generated last."""

    def __init__(self, num_rows: int) -> None:
        self._sequences: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._recent = np.empty((num_rows, 0), dtype=np.int64)  # [num_rows, width], the newest at the right end
        self._flat: tuple[IntArray, IntArray, IntArray] | None = None  # see `_flatten`

    def add_row(self, row: int, sequences: tuple[tuple[int, ...], ...], generated: Sequence[int]) -> None:
        """Set the row's sequences and the tokens that it has generated so far."""
        self._sequences[row] = tuple(sequence for sequence in sequences if sequence)
        self._flat = None
        self._widen(max(map(len, self._sequences[row]), default=1) - 1)
        width = self._recent.shape[1]
        tail = list(generated[-width:]) if width else []
        self._recent[row] = [NOTHING] * (width - len(tail)) + tail

    def free_row(self, row: int) -> None:
        if self._sequences.pop(row, None) is not None:
            self._flat = None

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        """Append one generated token to each of `rows`, [n]."""
        if self._recent.shape[1]:
            self._recent[rows, :-1] = self._recent[rows, 1:]
            self._recent[rows, -1] = token_ids

    def select(self, logit_index_of_row: IntArray) -> tuple[IntArray, IntArray]:
        """Return (logit indices, token ids) that are forbidden now. For the parameter see `TokenTable.select`."""
        if self._flat is None:
            self._flat = self._flatten()
        rows, prefixes, token_ids = self._flat
        indices = logit_index_of_row[rows]
        matches = (prefixes == ANY) | (prefixes == self._recent[rows])
        forbidden = (indices >= 0) & matches.all(axis=1)
        return indices[forbidden], token_ids[forbidden]

    def _widen(self, width: int) -> None:
        missing = width - self._recent.shape[1]
        if missing > 0:
            self._recent = np.pad(self._recent, ((0, 0), (missing, 0)), constant_values=NOTHING)

    def _flatten(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return the row of each sequence, its prefix at the right end of [num_sequences, width], and the token that
        must not follow."""
        width = self._recent.shape[1]
        owned = [(row, sequence) for row, sequences in self._sequences.items() for sequence in sequences]
        prefixes = [(ANY,) * (width - len(sequence) + 1) + sequence[:-1] for _, sequence in owned]
        return (
            np.array([row for row, _ in owned], dtype=np.int64),
            np.array(prefixes, dtype=np.int64).reshape(len(owned), width),
            np.array([sequence[-1] for _, sequence in owned], dtype=np.int64),
        )
