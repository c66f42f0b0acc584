"""The timers of a pure state machine: times by key, of which the earliest one is known. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Timers(Generic[Key]):
    """Setting a timer takes logarithmic time, whatever the number of timers."""

    def __init__(self) -> None:
        self._due: dict[Key, tuple[float, int]] = {}
        """Time and number of each timer."""
        self._heap: list[tuple[float, int, Key]] = []
        """The same, and timers that were set again or cancelled since."""
        self._numbers = itertools.count()

    @property
    def deadline(self) -> float | None:
        """Time of the earliest timer."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def set(self, key: Key, due: float) -> None:
        """Set the timer `key`, instead of an earlier one of that key."""
        if (former := self._due.get(key)) is not None and former[0] == due:
            return
        number = next(self._numbers)
        self._due[key] = due, number
        heapq.heappush(self._heap, (due, number, key))

    def cancel(self, key: Key) -> None:
        """Cancel the timer `key`, if there is one."""
        self._due.pop(key, None)

    def pop(self, now: float) -> tuple[Key, float] | None:
        """Remove the earliest timer and return it with its time; None if none is due."""
        if (due := self.deadline) is None or due > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        return key, due
