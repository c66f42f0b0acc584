"""Search for markers in text that comes in pieces."""

from __future__ import annotations

import re
from typing import NamedTuple


class MarkerFound(NamedTuple):
    """Result of a search: text before `end` belongs to no marker."""

    end: int
    """Index where the marker begins; without a marker, where text begins that may still become one."""
    marker: str | None


class MarkerSearch:
    """Finds the first of several markers; if several begin at the same place, the longest one."""

    def __init__(self, *markers: str) -> None:
        if not markers or not all(markers):
            raise ValueError("a search needs markers, none of them empty")
        by_length = sorted(markers, key=len, reverse=True)
        beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
        self._whole = re.compile("|".join(map(re.escape, by_length)))
        self._partial = re.compile(f"(?:{'|'.join(map(re.escape, beginnings))})\\Z") if beginnings else None
        self._longest = len(by_length[0])

    def find(self, text: str, start: int = 0, is_last: bool = False) -> MarkerFound:
        """Search the text from `start` on. With `is_last` no text follows, so the beginning of a marker is none."""
        whole = self._whole.search(text, start)
        partial = None
        if self._partial is not None and not is_last:
            partial = self._partial.search(text, max(start, len(text) - self._longest + 1))
        if whole is not None and (partial is None or whole.start() < partial.start()):
            return MarkerFound(whole.start(), whole.group())
        return MarkerFound(len(text) if partial is None else partial.start(), None)
