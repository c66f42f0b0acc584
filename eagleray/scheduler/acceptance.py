"""How often predictions of tokens come true. Pure.

Every prediction is compared with the token that comes, whether a step checks it or not. So the frequency of right ones
is measured for predictions of all requests that look alike (`Cell`), and each request is compared with these
(`Calibration`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NUM_LENGTHS = 7
"""Classes of matches by the number of bits of their length; longer ones count as those of the last class."""

PRIOR = (0.1, 0.15, 0.25, 0.35, 0.5, 0.6, 0.7)
"""Probability before anything was measured, by class of length."""

PRIOR_WEIGHT = 6.0
"""Number of predictions that the prior counts as."""

FORGET = 0.99
"""Weight of a prediction relative to the next one of its cell."""

NUM_DEVIATIONS = 1.0
"""Number of standard deviations by which the estimated probability lies below the mean."""

FORGET_OF_REQUEST = 0.95
WEIGHT_OF_REQUESTS = 4.0
"""Number of right predictions of a request that weigh as much as those of all requests."""

MOST_PROBABLE = 0.98


class Cell:
    """Predictions that look alike. `probability` is a cautious estimate that one of them is right."""

    __slots__ = ("_right", "_total", "probability")

    def __init__(self, prior: float) -> None:
        self._right, self._total = PRIOR_WEIGHT * prior, PRIOR_WEIGHT
        self.probability = 0.0
        self._estimate()

    def add(self, is_right: bool) -> None:
        """Count a prediction."""
        self._right = FORGET * self._right + is_right
        self._total = FORGET * self._total + 1
        self._estimate()

    def _estimate(self) -> None:
        mean = self._right / self._total
        self.probability = mean - NUM_DEVIATIONS * math.sqrt(mean * (1 - mean) / self._total)


class Acceptance:
    """The cells, by length of the match and agreement of the places."""

    def __init__(self) -> None:
        self._cells = [[Cell(prior) for _ in range(4)] for prior in PRIOR]

    def cell(self, match_length: int, *, count: int, total: int) -> Cell:
        """Return the cell of predictions that `count` of `total` places make after a match of `match_length` tokens."""
        of_length = self._cells[min(match_length.bit_length(), NUM_LENGTHS - 1)]
        if count == total:
            return of_length[min(total, 2) - 1]
        return of_length[2 if 2 * count > total else 3]


@dataclass(slots=True)
class Calibration:
    """The number of right predictions of a request, and the number that their cells led to expect. Older predictions
    count less."""

    right: float = 0.0
    expected: float = 0.0

    def add(self, is_right: bool, cell: Cell) -> None:
        self.right = FORGET_OF_REQUEST * self.right + is_right
        self.expected = FORGET_OF_REQUEST * self.expected + cell.probability

    def probability(self, cell: Cell) -> float:
        """Return the probability that the request's prediction of this cell is right."""
        factor = (self.right + WEIGHT_OF_REQUESTS) / (self.expected + WEIGHT_OF_REQUESTS)
        return min(MOST_PROBABLE, factor * cell.probability)
