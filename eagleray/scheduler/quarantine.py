"""Queue of suspects: requests that were running at several engine exits. Owned by the scheduler.

Suspects run one at a time among the other requests, so that the next exit of the engine identifies the one at fault.
"""

from __future__ import annotations

from collections.abc import Iterable

from eagleray.scheduler.queues import WaitingQueue
from eagleray.scheduler.request import Request
from eagleray.scheduler.step_draft import InFlightStep


class Quarantine:
    """The current suspect waits and runs among the other requests until it finishes; the rest are queued here.

    A preemption does not end its turn.
    """

    def __init__(self) -> None:
        self._queue = WaitingQueue()
        self._current: Request | None = None

    def __len__(self) -> int:
        """Return the number of queued suspects."""
        return len(self._queue)

    def push(self, suspect: Request) -> None:
        self._queue.push(suspect)

    def release_next(self, in_flight: Iterable[InFlightStep]) -> Request | None:
        """Release the next suspect to the waiting queue. Returns None if none is queued, if the current one has not
        finished, or if a step in flight still computes it."""
        if not self._queue or self._current is not None:
            return None
        if any(run.request.is_suspect for flight in in_flight for run in flight.runs):
            return None
        self._current = self._queue.pop()
        return self._current

    def remove(self, suspect: Request) -> bool:
        """Remove a suspect that finished or was aborted. Returns whether it was still queued here."""
        if suspect is self._current:
            self._current = None
            return False
        self._queue.remove(suspect)
        return True
