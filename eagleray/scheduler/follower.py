"""State of the prediction of a request's next tokens. Owned by the drafter, kept by the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Predictions:
    """Predictions that were compared with a token, and the right ones among them. Older ones count less."""

    right: float = 0.0
    total: float = 0.0

    def add(self, is_right: bool, forget: float) -> None:
        self.right = forget * self.right + is_right
        self.total = forget * self.total + 1


@dataclass(slots=True)
class Follower:
    """A request's place in the tokens that it is predicted to repeat."""

    number: int
    """Number of the request's sequence in the index."""
    num_indexed: int = 0
    """Number of first tokens whose n-grams are in the index."""
    source: Sequence[int] | None = None
    """Tokens that the request follows; None without a match."""
    place: int = 0
    """Index of the predicted next token in `source`."""
    match_length: int = 0
    seen: Predictions = field(default_factory=Predictions)
