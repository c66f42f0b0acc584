"""Queue of the requests that wait for a row. Owned by the scheduler."""

from __future__ import annotations

import heapq

from eagleray.scheduler.request import Request

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


def _key(request: Request) -> Key:
    return request.priority, request.arrival
