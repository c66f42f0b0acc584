"""Requests without a row. Owned by the scheduler.

Suspects are requests that were running at several engine exits. They run one at a time among the other requests, so
that the next exit of the engine identifies the one at fault."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from eagleray.messages.grammars import Grammar
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

    def __contains__(self, request: Request) -> bool:
        return _key(request) in self._requests

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

    @property
    def may_release(self) -> bool:
        """Whether a suspect waits for its turn, and it is nobody's turn."""
        return len(self._queue) > 0 and self._current is None

    def is_current(self, suspect: Request) -> bool:
        """Whether it is this suspect's turn."""
        return suspect is self._current

    def release_next(self, in_flight: Iterable[InFlightStep]) -> Request | None:
        """Release the next suspect to the waiting queue. Returns None if none is queued, if the current one has not
        finished, or if a step in flight still computes it."""
        if not self.may_release:
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


class Backlog:
    """The requests without a row, in four queues: requests that may be admitted, those whose grammar is being compiled,
    suspects that wait for their turn, and requests that are held back because the engine only finishes those under
    way."""

    def __init__(self) -> None:
        self._admissible = WaitingQueue()
        self._quarantine = Quarantine()
        self._held_back = WaitingQueue()
        self._unprepared: dict[Grammar, list[Request]] = {}
        self._holds_back = False

    def __len__(self) -> int:
        return len(self._held_back) + self._num_unprepared + self.num_to_admit

    @property
    def num_to_admit(self) -> int:
        """Number of requests that need no `release` to be admitted, only room and, if suspects, their turn."""
        return len(self._admissible) + len(self._quarantine)

    @property
    def may_admit(self) -> bool:
        """Whether a request could be admitted if there were room and no step in flight."""
        return len(self._admissible) > 0 or self._quarantine.may_release

    @property
    def num_deferred(self) -> int:
        """Number of requests that room alone does not admit: suspects that wait for their turn, requests that wait
        for their grammar, and requests that are held back."""
        return len(self._held_back) + len(self._quarantine) + self._num_unprepared

    @property
    def has_unprepared(self) -> bool:
        """Whether requests wait for a grammar."""
        return bool(self._unprepared)

    @property
    def has_underway(self) -> bool:
        """Whether there are requests under way, which are computed although others are held back."""
        waiting = (request for requests in self._unprepared.values() for request in requests)
        return self.num_to_admit > 0 or any(request.is_underway for request in waiting)

    def is_awaited(self, grammar: Grammar) -> bool:
        """Whether requests wait for this grammar."""
        return grammar in self._unprepared

    def first_unprepared(self, limit: int) -> list[Grammar]:
        """Return up to `limit` grammars that requests wait for, in the order in which these requests are admitted."""
        return heapq.nsmallest(limit, self._unprepared, key=lambda grammar: min(map(_key, self._unprepared[grammar])))

    def unprepared(self, grammar: Grammar) -> Sequence[Request]:
        """Return the requests that wait for this grammar."""
        return self._unprepared.get(grammar, ())

    def push_unprepared(self, request: Request, grammar: Grammar) -> None:
        """Add a request that waits for its grammar."""
        self._unprepared.setdefault(grammar, []).append(request)

    def pop_unprepared(self, grammar: Grammar) -> list[Request]:
        """Remove and return the requests that wait for a grammar, in order of arrival."""
        return self._unprepared.pop(grammar, [])

    def push(self, request: Request) -> None:
        """Add a request that is new, or was preempted."""
        if request.is_suspect and not self._quarantine.is_current(request):
            self._quarantine.push(request)
        elif self._holds_back and not request.is_underway:
            self._held_back.push(request)
        else:
            self._admissible.push(request)

    def release_suspect(self, in_flight: Iterable[InFlightStep]) -> None:
        """Let the next suspect be admitted, if none runs."""
        if (suspect := self._quarantine.release_next(in_flight)) is not None:
            self._admissible.push(suspect)

    def first(self) -> Request | None:
        """Return the next request to admit without removing it."""
        return self._admissible.first() if self._admissible else None

    def pop(self) -> Request:
        return self._admissible.pop()

    def on_finished(self, request: Request, *, has_row: bool) -> None:
        """Remove a request that finished or was aborted. One with a row is in no queue."""
        if self._remove_unprepared(request):
            if self._quarantine.is_current(request):
                self._quarantine.remove(request)
            return
        was_quarantined = request.is_suspect and self._quarantine.remove(request)
        if not has_row and not was_quarantined:
            (self._held_back if request in self._held_back else self._admissible).remove(request)

    def _remove_unprepared(self, request: Request) -> bool:
        grammar = request.sampling.grammar
        if grammar is None or request not in (requests := self._unprepared.get(grammar, [])):
            return False
        requests.remove(request)
        if not requests:
            self._unprepared.pop(grammar)
        return True

    @property
    def _num_unprepared(self) -> int:
        return sum(map(len, self._unprepared.values()))

    def hold_back(self) -> None:
        """Admit only requests that are under way until `release`."""
        self._holds_back = True
        waiting, self._admissible = self._admissible, WaitingQueue()
        while waiting:
            self.push(waiting.pop())

    def release(self) -> None:
        """Admit every request again."""
        self._holds_back = False
        while self._held_back:
            self._admissible.push(self._held_back.pop())


def _key(request: Request) -> Key:
    return request.priority, request.arrival
