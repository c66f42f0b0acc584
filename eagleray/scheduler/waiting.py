"""Waiting requests: the queue for a row, and the quarantine of suspects. Owned by the scheduler.

Suspects are requests that were running at several engine exits. They run one at a time among the other requests, so
that the next exit of the engine identifies the one at fault."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from eagleray.scheduler.request import Request
from eagleray.scheduler.running import InFlightStep

Key = tuple[int, int]


class WaitingQueue:
    """Requests by priority (lower first), then by arrival.

    First-come-first-served is the case of equal priorities. Requests of one priority are admitted in the order of their
    arrival, so a preempted one, which arrived before all waiting ones of its priority, returns to their front.
    """

    def __init__(self) -> None:
        self._requests: dict[Key, Request] = {}
        self._keys: list[Key] = []  # heap; the keys of removed requests stay until they reach its top

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        self._requests[_key(request)] = request
        heapq.heappush(self._keys, _key(request))

    def first(self) -> Request:
        """Return the next request to admit without removing it."""
        while self._keys[0] not in self._requests:
            heapq.heappop(self._keys)
        return self._requests[self._keys[0]]

    def pop(self) -> Request:
        request = self.first()
        heapq.heappop(self._keys)
        del self._requests[_key(request)]
        return request

    def remove(self, request: Request) -> None:
        del self._requests[_key(request)]


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


def _key(request: Request) -> Key:
    return request.priority, request.arrival
