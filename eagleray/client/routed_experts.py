"""Which experts computed the tokens of one completion: the rows that its chunks have brought, in order. Pure.

Kept in one array that grows: a long completion brings a row with each token, and an object for each would outweigh the
rows.
"""

from __future__ import annotations

import numpy as np

from eagleray.messages.arrays import Array
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import RoutedExperts

__all__ = ["RoutedRows"]


class RoutedRows:
    """The rows of positions `start` to `end`. What is known already is not replaced."""

    def __init__(self, routing: RoutingInfo, *, start: int, num_prompt_tokens: int) -> None:
        self.start = start
        self._num_prompt_tokens = num_prompt_tokens
        dtype = np.uint8 if routing.num_experts <= 256 else np.uint16
        self._rows: Array = np.empty((0, routing.num_layers, routing.top_k), dtype)
        """More than are known: the others are room for what comes."""
        self._num_known = 0
        self._num_taken = 0

    @property
    def end(self) -> int:
        """The first position that is missing."""
        return self.start + self._num_known

    def add(self, part: RoutedExperts) -> None:
        """The next rows, perhaps with known ones before them."""
        num_repeated = self.end - part.start
        assert num_repeated >= 0, f"routed experts from position {part.start} on, after those before {self.end}"
        new = part.experts[num_repeated:]
        assert (new.dtype, new.shape[1:]) == (self._rows.dtype, self._rows.shape[1:]), f"{new.dtype} {new.shape}"
        end = self._num_known + len(new)
        if end > len(self._rows):
            grown = np.empty((max(end, 2 * len(self._rows)), *self._rows.shape[1:]), self._rows.dtype)
            grown[: self._num_known] = self._rows[: self._num_known]
            self._rows = grown
        self._rows[self._num_known : end] = new
        self._num_known = end

    def cut(self, num_output_tokens: int) -> None:
        """Of the output only so many tokens count, and the last token of all has no row."""
        self._num_known = min(self._num_known, self._num_prompt_tokens + num_output_tokens - 1 - self.start)

    def take(self) -> RoutedExperts | None:
        """What is new since the last call; None if nothing is."""
        if self._num_taken >= self._num_known:
            return None
        rows = self._rows[self._num_taken : self._num_known].copy()
        part = RoutedExperts(self.start + self._num_taken, rows)
        self._num_taken = self._num_known
        return part

    def all(self) -> Array:
        """All of them, whatever has been taken: [num_rows, num_moe_layers, top_k]"""
        return self._rows[: self._num_known].copy()
