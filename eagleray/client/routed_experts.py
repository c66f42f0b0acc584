"""Which experts computed the tokens of one completion: the rows that its chunks have brought, in order. Pure.

Kept as the bytes they came as: a long completion brings a row with each token, and an array for each would outweigh the
rows.
"""

from __future__ import annotations

from eagleray.messages.arrays import Array
from eagleray.messages.membership import RoutingInfo


class RoutedExpertsBuffer:
    """The rows of positions `start` to `end` - 1. What is known is never replaced."""

    __slots__ = ("_num_prompt_tokens", "_num_taken", "_routing", "_row_bytes", "known", "start")

    def __init__(self, routing: RoutingInfo, *, start: int, num_prompt_tokens: int) -> None:
        self.start = start
        self._num_prompt_tokens = num_prompt_tokens
        self._routing = routing
        self._row_bytes = routing.row_bytes
        self.known = bytearray()
        """The rows so far; who brings the next ones appends them."""
        self._num_taken = 0
        """Bytes."""

    @property
    def end(self) -> int:
        """The first position that is missing."""
        return self.start + len(self.known) // self._row_bytes

    def check(self, num_output_tokens: int) -> None:
        """The request has come to its own end with so many tokens: all rows must be here."""
        expected = (self._last_end(num_output_tokens) - self.start) * self._row_bytes
        assert len(self.known) == expected, f"{len(self.known)} bytes of routed experts, not {expected}"

    def cut(self, num_output_tokens: int) -> None:
        """Of the output only so many tokens count."""
        del self.known[(self._last_end(num_output_tokens) - self.start) * self._row_bytes :]

    def _last_end(self, num_output_tokens: int) -> int:
        """The last token of all has no row."""
        return max(self.start, self._num_prompt_tokens + num_output_tokens - 1)

    def take(self) -> tuple[int, Array] | None:
        """What is new since the last call, and the position of its first row; None if nothing is."""
        if self._num_taken >= len(self.known):
            return None
        start = self.start + self._num_taken // self._row_bytes
        rows = self._routing.rows(self.known[self._num_taken :])
        self._num_taken = len(self.known)
        return start, rows

    def all(self) -> Array:
        """All of them, whatever has been taken: [num_rows, num_moe_layers, top_k]"""
        return self._routing.rows(self.known[:])
