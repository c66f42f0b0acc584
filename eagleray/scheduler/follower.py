"""The prediction of a request's next tokens: places at which its last tokens occurred before, and what followed there.

Kept by the drafter for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from eagleray.scheduler.acceptance import Calibration, Cell
from eagleray.scheduler.token_index import IndexedSequence, Place

FORGET_ACCEPTED = 0.95
"""Factor of the accepted tokens of a request for each further token."""

FIRST_ACCEPTED = 3.0
"""Number of accepted tokens that a request begins with."""


class Prediction(NamedTuple):
    """A predicted token."""

    token_id: int
    share: float
    """Share of the places at which it follows."""
    cell: Cell
    """Predictions like this one."""


@dataclass(slots=True, eq=False)
class Follower:
    """A request's places in the tokens that it is predicted to repeat."""

    sequence: IndexedSequence
    """Tokens of the request that are found by lookups."""
    token_ids: Sequence[int]
    """All tokens of the request."""
    tail: list[int] = field(default_factory=list)
    """The list of `sequence`, if that is not the list of the request: its last tokens."""
    num_before_tail: int = 0
    """Number of the request's tokens before `tail`."""
    places: list[Place] = field(default_factory=list)
    """Places that the request follows, the newest first, each before a token; empty without a match."""
    match_length: int = 0
    """Number of tokens that are equal before all of these places."""
    prediction: Prediction | None = None
    """Prediction of the next token; None without a match."""
    calibration: Calibration = field(default_factory=Calibration)
    num_accepted: float = FIRST_ACCEPTED
    """Drafted tokens of the request that were accepted. Older ones count less."""
    is_cold: bool = False
    """Whether no token is predicted, because drafts of the request were of little use."""

    def cool_down(self) -> None:
        """Predict nothing until the request repeats more tokens."""
        self.is_cold = True
        self.places, self.match_length, self.prediction = [], 0, None

    def advance(self, token_id: int, *, max_match: int) -> None:
        """Follow the places whose next token is the one that came."""
        self.places = _behind(self.places, token_id)
        self.match_length = min(self.match_length + 1, max_match) if self.places else 0


def most_frequent(places: Sequence[Place]) -> tuple[int, int]:
    """Return the token that follows at most of these places, the first of several, and at how many of them."""
    if len(places) == 1:
        token_ids, index = places[0]
        return token_ids[index], 1
    counts: dict[int, int] = {}
    for token_ids, index in places:
        token_id = token_ids[index]
        counts[token_id] = counts.get(token_id, 0) + 1
    token_id = max(counts, key=counts.__getitem__)
    return token_id, counts[token_id]


def _behind(places: Sequence[Place], token_id: int) -> list[Place]:
    """Return the places behind this token, among those whose next token it is."""
    return [
        Place(token_ids, index + 1)
        for token_ids, index in places
        if token_ids[index] == token_id and index + 1 < len(token_ids)
    ]
