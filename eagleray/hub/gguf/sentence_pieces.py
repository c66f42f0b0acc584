"""The merges of SentencePiece's BPE, of whose vocabulary GGUF has the pieces and their scores alone."""

from __future__ import annotations

from collections.abc import Mapping

SPACE = "▁"
"""Character of pieces that stands for a space."""


def merges_of(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces whose text is a piece, those of the highest score first.

    SentencePiece merges the two neighbours whose text has the highest score; so do merges in this order.
    """
    found = []
    for piece, score in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-score, -len(left), left, right))
    return [(left, right) for _, _, left, right in sorted(found)]
