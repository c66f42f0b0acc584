"""Token sequences that must not be generated.

The last token of a sequence is forbidden where the ones before it are the tokens generated last. As in vLLM the prompt
does not count: a sequence that begins in the prompt may be completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eagleray.worker.token_table import IntArray

NOTHING = -1
"""In place of a generated token, before there was one: equal to no token."""
ANY = -2
"""In place of a token of a prefix, where the prefix is shorter than the longest."""


class _Flat(NamedTuple):
    rows: IntArray
    prefixes: IntArray
    """[num_sequences, width], the prefix at the right end"""
    token_ids: IntArray
    """[num_sequences] the token that must not follow"""


class BadWords:
    """The sequences of all rows, and the tokens that these rows generated last."""

    def __init__(self, num_rows: int) -> None:
        self._sequences: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._recent = np.empty((num_rows, 0), dtype=np.int64)  # [num_rows, width], the newest at the right end
        self._flat: _Flat | None = None

    def start(self, row: int, sequences: tuple[tuple[int, ...], ...], generated: Sequence[int]) -> None:
        """A row has these sequences and has generated these tokens so far."""
        self._sequences[row] = tuple(sequence for sequence in sequences if sequence)
        self._flat = None
        self._widen(max(map(len, self._sequences[row]), default=1) - 1)
        width = self._recent.shape[1]
        tail = list(generated[-width:]) if width else []
        self._recent[row] = [NOTHING] * (width - len(tail)) + tail

    def end(self, row: int) -> None:
        if self._sequences.pop(row, None) is not None:
            self._flat = None

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """Each of `rows` generated one more token, [n]."""
        if self._recent.shape[1]:
            self._recent[rows, :-1] = self._recent[rows, 1:]
            self._recent[rows, -1] = token_ids

    def select(self, line_of: IntArray) -> tuple[IntArray, IntArray]:
        """(lines, token ids) that are forbidden now; `line_of` as in `TokenTable.select`."""
        if self._flat is None:
            self._flat = self._flatten()
        rows, prefixes, token_ids = self._flat
        lines = line_of[rows]
        matches = (prefixes == ANY) | (prefixes == self._recent[rows])
        forbidden = (lines >= 0) & matches.all(axis=1)
        return lines[forbidden], token_ids[forbidden]

    def _widen(self, width: int) -> None:
        missing = width - self._recent.shape[1]
        if missing > 0:
            self._recent = np.pad(self._recent, ((0, 0), (missing, 0)), constant_values=NOTHING)

    def _flatten(self) -> _Flat:
        width = self._recent.shape[1]
        owned = [(row, sequence) for row, sequences in self._sequences.items() for sequence in sequences]
        prefixes = [(ANY,) * (width - len(sequence) + 1) + sequence[:-1] for _, sequence in owned]
        return _Flat(
            np.array([row for row, _ in owned], dtype=np.int64),
            np.array(prefixes, dtype=np.int64).reshape(len(owned), width),
            np.array([sequence[-1] for _, sequence in owned], dtype=np.int64),
        )
