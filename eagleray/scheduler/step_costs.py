"""The measured time of steps by the numbers of their rows and tokens, and what drafts have gained. Pure.

Whether drafts pay depends on the time of further tokens in a step. On a CPU it is nothing for a few tokens, as long as
the step takes the time to read the weights, and then grows with each, so it is measured for classes of numbers of
tokens, and interpolated between them. A wrong estimate costs time and changes no token.
"""

from __future__ import annotations

import math
from bisect import bisect_left

LARGEST_OF_CLASS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
"""Largest number of tokens of each class but the last."""

NEWEST = 0.05
"""Least weight of the newest step in the mean of its class."""

EXPECTED_COUNT = 1
"""Number of steps as which the expected time counts in the mean of a class, so that a delayed one is not all of it."""

MAX_EXCESS = 4.0
"""A step counts at most this many times as long as expected, because something else was delayed. On a machine that
others use larger steps, of more threads, are delayed more often, so it is not close to 1."""

FEW_STEPS, MAX_EXCESS_OF_FEW = 4, 1.5
"""The same for the first steps of a class: if one of them was delayed, the class might look too expensive to be tried
again. If it does take longer, its expected time grows with each step."""

FORGET = 0.9998
"""Factor of the time of a class for each step that is not of it, so that a class is tried again in the end."""

FURTHER_TOKEN = 0.5
"""Time of a further token beyond all classes that were measured, in units of the time per token of the last one. It is
low, so that larger steps are tried."""

REFRESH_STEPS = 8
"""Number of steps after which the expected times are computed anew."""

INCOME = 0.005
"""Part of the time of each step that drafts may lose."""

FIRST_BALANCE, MOST_BALANCE, LEAST_BALANCE = 0.5, 1.0, -1.0
"""Limits of the balance, in times of a step without drafts. From the last one on drafts end."""

MOST_LOSS = 1.0
"""A step takes at most this from the balance. If it took longer, something else was delayed."""

LEAST_GAIN, LEAST_GAIN_IN_DEBT = 0.05, 0.2
"""Expected gain in speed below which nothing is drafted, and that while drafts have lost more than they may."""


class StepCosts:
    """Means of tokens and seconds of each class of steps. The steps have about the same number of rows."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}
        self._num_steps = 0
        self._counts: dict[int, int] = {}
        self._last_step: dict[int, int] = {}
        self._points: list[tuple[float, float]] = []
        self.balance = FIRST_BALANCE
        """Time that drafts have gained and may lose, in units of a step without drafts. When it is used up, they have
        to promise more, and end if they lose on, until enough steps have gone without."""

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count a step."""
        self._num_steps += 1
        index = bisect_left(LARGEST_OF_CLASS, num_tokens)
        count = self._counts[index] = self._counts.get(index, 0) + 1
        expected = self.seconds(num_tokens) if self._points else seconds
        seconds = min(seconds, (MAX_EXCESS if count > FEW_STEPS else MAX_EXCESS_OF_FEW) * expected)
        tokens, mean = self._means.get(index, (num_tokens, expected))
        weight = max(NEWEST, 1 / (count + EXPECTED_COUNT))
        self._means[index] = tokens + weight * (num_tokens - tokens), mean + weight * (seconds - mean)
        self._last_step[index] = self._num_steps
        if count < REFRESH_STEPS or self._num_steps % REFRESH_STEPS == 0:
            self._points = self._rising_points()

    def settle(self, *, num_rows: int, num_drafts: int, num_accepted: int, seconds: float, num_steps: int = 1) -> None:
        """Add to the balance what the drafts of a step have gained or lost, by its time and that expected without them.
        It stands for `num_steps` steps."""
        gain = INCOME * num_steps
        if num_drafts:
            seconds = min(seconds, MAX_EXCESS * self.seconds(num_rows + num_drafts))
            gain += max(-MOST_LOSS, num_accepted / num_rows - seconds / self.seconds(num_rows) + 1)
        self._add_to_balance(gain)

    def charge(self, seconds: float, *, num_rows: int) -> None:
        """Take the time in which drafts were made from the balance. The steps have been counted before."""
        without = self.seconds(num_rows)
        self._add_to_balance(-min(MOST_LOSS, seconds / without))

    @property
    def is_measured(self) -> bool:
        """Whether times are in seconds."""
        return bool(self._points)

    @property
    def least_gain(self) -> float:
        """Expected gain in speed by drafts below which nothing is drafted."""
        if self.balance > 0:
            return LEAST_GAIN
        return LEAST_GAIN_IN_DEBT if self.balance > LEAST_BALANCE else math.inf

    @property
    def most_tokens(self) -> int:
        """Number of tokens of a step that is at most twice as large as all that were measured."""
        return 2 * LARGEST_OF_CLASS[min(max(self._means, default=0), len(LARGEST_OF_CLASS) - 1)]

    def seconds(self, num_tokens: int) -> float:
        """Return the expected time of a step. In units of anything before the first step."""
        points = self._points
        if not points:
            return 1.0 + FURTHER_TOKEN * num_tokens
        at = bisect_left(points, (num_tokens, 0.0))
        if at == len(points):
            last_tokens, last = points[-1]
            return last + (num_tokens - last_tokens) * FURTHER_TOKEN * last / last_tokens
        tokens, seconds = points[at]
        if at == 0:
            return seconds
        before, seconds_before = points[at - 1]
        return seconds_before + (seconds - seconds_before) * (num_tokens - before) / (tokens - before)

    def _add_to_balance(self, gain: float) -> None:
        # The loss of the step with which drafts end counts, too: else they would lose it again at once.
        self.balance = min(MOST_BALANCE, max(LEAST_BALANCE - MOST_LOSS, self.balance + gain))

    def _rising_points(self) -> list[tuple[float, float]]:
        """Return tokens and seconds of the classes, where a larger step takes at least the time of smaller ones."""
        points: list[tuple[float, float]] = []
        longest = 0.0
        for index, (tokens, seconds) in sorted(self._means.items()):
            longest = max(longest, seconds * FORGET ** (self._num_steps - self._last_step[index]))
            points.append((tokens, longest))
        return points
