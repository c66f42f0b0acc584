"""Increase of counters over the last seconds, and quantiles of a histogram. Pure: times are passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_GAP_SECONDS = 5.0
"""Time without a sample after which the older ones are dropped, because nobody watched and an average over it would
mislead."""


class CounterWindow(Generic[K]):
    """Samples of counters of the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: deque[tuple[float, Mapping[K, float]]] = deque()
        self.increase: dict[K, float] = {}
        """Increase of each counter of the last sample. A counter that the first sample lacks counts from the first one
        that has it, because its earlier increase may be older than the window."""

    def add(self, now: float, counters: Mapping[K, float]) -> None:
        """Add a sample, at a time of any steady clock."""
        samples = self._samples
        if samples and now - samples[-1][0] > MAX_GAP_SECONDS:
            samples.clear()
        samples.append((now, counters))
        while len(samples) > 2 and samples[1][0] <= now - self._seconds:
            samples.popleft()
        self.increase = {
            key: count - next(earlier[key] for _, earlier in samples if key in earlier)
            for key, count in counters.items()
        }

    @property
    def seconds(self) -> float:
        """Time between the first and the last sample; 0 if there are no two."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def rate(self, key: K) -> float | None:
        """Return the increase of a counter per second; None before there are two samples."""
        return self.increase.get(key, 0.0) / self.seconds if self.seconds else None


def quantile(bounds: Sequence[float], counts: Sequence[float], part: float) -> float | None:
    """Return the value below which `part` of the values are, interpolated in its bucket as Prometheus does.

    `counts`: number of values up to each of the ascending `bounds` and above the one before, then of those above the
    last, for which the last bound stands. None without values.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, below, lower = part * total, 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= wanted:
            return lower + (bound - lower) * (wanted - below) / count
        below += count
        lower = bound
    return bounds[-1]
