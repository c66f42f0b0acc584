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
        self.end = start
        """The first position that is missing."""
        self._num_prompt_tokens = num_prompt_tokens
        self._routing = routing
        self._row_bytes = routing.row_bytes
        self._known = bytearray()
        self._num_taken = 0
        """Bytes."""

    def add(self, part: RoutedExperts) -> None:
        """The next rows, perhaps with known ones before them."""
        experts, size = part.experts, self._row_bytes
        if part.start != self.end:
            assert part.start < self.end, f"routed experts from position {part.start} on, after those before {self.end}"
            experts = experts[(self.end - part.start) * size :]
        num_new, rest = divmod(len(experts), size)
        assert rest == 0, f"{len(experts)} bytes in rows of {size}"
        self._known += experts
        self.end += num_new

    def cut(self, num_output_tokens: int) -> None:
        """Of the output only so many tokens count, and the last token of all has no row."""
        self.end = max(self.start, min(self.end, self._num_prompt_tokens + num_output_tokens - 1))
        del self._known[(self.end - self.start) * self._row_bytes :]

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
