"""The experts that computed the tokens of one completion, as rows in the order in which chunks brought them. Pure.

Kept as the bytes of the messages: a long completion gets a row with each token, and an array for each would outweigh
the rows. The last ones are kept as they came, since it takes ten times as long to append each alone.
"""

from __future__ import annotations

from eagleray.messages.arrays import Array
from eagleray.messages.membership import RoutingInfo

MAX_LAST_PARTS = 64
"""Number of parts, mostly of one row, after which they are joined."""


class RoutedExpertsBuffer:
    """The rows of positions `start` to `end` - 1. A known row is never replaced."""

    __slots__ = ("_joined", "_last_parts", "_num_prompt_tokens", "_num_read", "_routing", "_row_bytes", "start")

    def __init__(self, routing: RoutingInfo, *, start: int, num_prompt_tokens: int) -> None:
        self.start = start
        self._joined = bytearray()
        self._last_parts: list[bytes] = []
        self._num_prompt_tokens = num_prompt_tokens
        self._routing = routing
        self._row_bytes = routing.row_bytes
        self._num_read = 0
        """Number of bytes of the rows that the reader has got."""

    def append(self, rows: bytes) -> None:
        """Append the next rows."""
        self._last_parts.append(rows)
        if len(self._last_parts) == MAX_LAST_PARTS:
            self._rows()

    @property
    def end(self) -> int:
        """The first position whose row is missing."""
        return self.start + len(self._rows()) // self._row_bytes

    def check_complete(self, num_output_tokens: int) -> None:
        """Assert that all rows are here. The completion has ended by itself, with `num_output_tokens` tokens."""
        expected = (self._last_end(num_output_tokens) - self.start) * self._row_bytes
        found = len(self._rows())
        assert found == expected, f"{found} bytes of routed experts, not {expected}"

    def truncate(self, num_output_tokens: int) -> None:
        """Drop the rows of output tokens after the first `num_output_tokens`."""
        del self._rows()[(self._last_end(num_output_tokens) - self.start) * self._row_bytes :]

    def _last_end(self, num_output_tokens: int) -> int:
        """Return the position of the last token, which has no row because it is never computed."""
        return max(self.start, self._num_prompt_tokens + num_output_tokens - 1)

    def pop_new(self) -> tuple[int, Array] | None:
        """Return the position of the first row since the last call, and the rows; None if there are no new rows."""
        joined = self._rows()
        if self._num_read >= len(joined):
            return None
        start = self.start + self._num_read // self._row_bytes
        rows = self._routing.rows(joined[self._num_read :])
        self._num_read = len(joined)
        return start, rows

    def all(self) -> Array:
        """Return all rows, read or not: [num_rows, num_moe_layers, top_k]"""
        return self._routing.rows(self._rows()[:])

    def _rows(self) -> bytearray:
        """Return all rows, joined."""
        if self._last_parts:
            self._joined += b"".join(self._last_parts)
            self._last_parts.clear()
        return self._joined
