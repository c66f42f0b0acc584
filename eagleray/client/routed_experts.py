"""Which experts computed the tokens of one completion: the rows that its chunks have brought, in order. Pure.

Kept as the bytes they came as: a long completion brings a row with each token, and an array for each would outweigh the
rows.
"""

from __future__ import annotations

from eagleray.messages.arrays import Array
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import RoutedExperts

__all__ = ["RoutedRows"]


class RoutedRows:
    """The rows of positions `start` to `end`. What is known already is not replaced."""

    def __init__(self, routing: RoutingInfo, *, start: int, num_prompt_tokens: int) -> None:
        self.start = start
        self._num_prompt_tokens = num_prompt_tokens
        self._routing = routing
        self._row_bytes = routing.row_bytes
        self._known = bytearray()
        self._num_taken = 0
        """Bytes."""

    @property
    def end(self) -> int:
        """The first position that is missing."""
        return self.start + len(self._known) // self._row_bytes

    def add(self, part: RoutedExperts) -> None:
        """The next rows, perhaps with known ones before them."""
        num_repeated = self.end - part.start
        assert num_repeated >= 0, f"routed experts from position {part.start} on, after those before {self.end}"
        assert len(part.experts) % self._row_bytes == 0, f"{len(part.experts)} bytes in rows of {self._row_bytes}"
        self._known += part.experts[num_repeated * self._row_bytes :] if num_repeated else part.experts

    def cut(self, num_output_tokens: int) -> None:
        """Of the output only so many tokens count, and the last token of all has no row."""
        num_rows = self._num_prompt_tokens + num_output_tokens - 1 - self.start
        del self._known[max(0, num_rows) * self._row_bytes :]

    def take(self) -> tuple[int, Array] | None:
        """What is new since the last call, and the position of its first row; None if nothing is."""
        if self._num_taken >= len(self._known):
            return None
        start = self.start + self._num_taken // self._row_bytes
        rows = self._routing.rows(self._known[self._num_taken :])
        self._num_taken = len(self._known)
        return start, rows

    def all(self) -> Array:
        """All of them, whatever has been taken: [num_rows, num_moe_layers, top_k]"""
        return self._routing.rows(self._known[:])
