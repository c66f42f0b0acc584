"""Suggestions for words that were mistyped or that other programs use."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

CLOSE = 0.75
"""Similarity of two spellings from which one is suggested for the other."""


def suggest(word: str, known: Collection[str], meanings: Mapping[str, str], *, cutoff: float = CLOSE) -> str | None:
    """Return the known word that `word` means, or else the one that is spelled much like it; None without one."""
    if (meant := meanings.get(word)) in known:
        return meant
    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return close[0] if close else None
