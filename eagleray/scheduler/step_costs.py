"""The measured time of steps by the number of their tokens. Pure.

Whether drafts pay depends on the time of further tokens in a step. On a CPU it is nothing for a few tokens, as long as
the step takes the time to read the weights, and then grows with each, so it is measured for classes of numbers of
tokens, and interpolated between them. A wrong estimate costs time and changes no token.
"""

from __future__ import annotations

from bisect import bisect_left

LARGEST_OF_CLASS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
"""Largest number of tokens of each class but the last."""

NEWEST = 0.3
"""Weight of the newest step in the mean of its class."""

MAX_EXCESS = 2.0
"""A step counts at most this many times as long as the mean of its class, because something else was delayed."""

FORGET = 0.9995
"""Factor of the time of a class for each step that is not of it, so that a class is tried again in the end."""

FURTHER_TOKEN = 0.25
"""Time of a further token beyond all classes that were measured, in units of the time per token of the last one. It is
low, so that larger steps are tried."""


class StepCosts:
    """Means of tokens and seconds of each class of steps."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}
        self._num_steps = 0
        self._last_step: dict[int, int] = {}
        self._points: list[tuple[float, float]] = []

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count a step."""
        self._num_steps += 1
        index = bisect_left(LARGEST_OF_CLASS, num_tokens)
        if (mean := self._means.get(index)) is None:
            self._means[index] = num_tokens, seconds
        else:
            seconds = min(seconds, MAX_EXCESS * mean[1])
            self._means[index] = mean[0] + NEWEST * (num_tokens - mean[0]), mean[1] + NEWEST * (seconds - mean[1])
        self._last_step[index] = self._num_steps
        self._points = self._rising_points()

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

    def _rising_points(self) -> list[tuple[float, float]]:
        """Return tokens and seconds of the classes, where a larger step takes at least the time of smaller ones."""
        points: list[tuple[float, float]] = []
        longest = 0.0
        for index, (tokens, seconds) in sorted(self._means.items()):
            longest = max(longest, seconds * FORGET ** (self._num_steps - self._last_step[index]))
            points.append((tokens, longest))
        return points
