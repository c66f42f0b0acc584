"""Requests that engines have died with, more than once each. Owned by the scheduler.

One of them at a time is let to the other requests; when the engine dies, it is known which one was there.
"""

from __future__ import annotations

from collections.abc import Iterable

from eagleray.scheduler.queues import WaitingQueue
from eagleray.scheduler.request import Request
from eagleray.scheduler.step_draft import InFlightStep


class Quarantine:
    """The one whose turn it is waits and runs among the others until it ends; the rest wait here, in the usual order.

    A preemption does not end its turn.
    """

    def __init__(self) -> None:
        self._queue = WaitingQueue()
        self._current: Request | None = None

    def __len__(self) -> int:
        """How many wait here."""
        return len(self._queue)

    def push(self, suspect: Request) -> None:
        self._queue.push(suspect)

    def next(self, in_flight: Iterable[InFlightStep]) -> Request | None:
        """Whose turn it is from now on. None: nobody waits, or another one's turn is not over: it has not ended, or
        a step in flight still computes it."""
        if not self._queue or self._current is not None:
            return None
        if any(run.request.is_suspect for flight in in_flight for run in flight.runs):
            return None
        self._current = self._queue.pop()
        return self._current

    def end(self, suspect: Request) -> bool:
        """It has ended. Whether it still waited here."""
        if suspect is self._current:
            self._current = None
            return False
        self._queue.remove(suspect)
        return True
