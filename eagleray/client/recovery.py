"""What the deaths of engines mean to a request: how often it goes on elsewhere, and when it is a suspect. Pure.

A request that kills engines must fail, and alone; one whose engines are killed by others must not. How an engine died
does not tell the two apart: SIGKILL may come from an operator, or from a kernel that ran out of memory because of the
request. Progress does. A request that kills engines does so at the same place again and again, so a death counts
against those requests alone that the engine had started, and a token that came since the last death clears the count.

The first death is charged to all requests that were there. From then on engines announce when they start a request
that they were sent again, and what had only waited is not charged. A request with two deaths is a suspect: an engine
runs one suspect at a time. A second, far larger count is never cleared: it ends requests that bring a few tokens each
time and kill their engine all the same.
"""

from __future__ import annotations

from typing import Protocol

from eagleray.errors import EngineFailed

SUSPECT_DEATHS = 2

PROGRESS_FACTOR = 10
"""A request that brings tokens between the deaths of its engines may lose this many times as many."""


class RecoveryObserver(Protocol):
    """Told how requests survive; called in the event loop of the client."""

    def resumed(self, num_requests: int, num_tokens: int) -> None:
        """So many requests go on with another engine, which computes so many tokens, of prompts and outputs, again."""

    def next_token(self, seconds: float) -> None:
        """A resumed request has brought a token, so long after its engine was lost."""

    def given_up(self, num_requests: int) -> None:
        """So many requests have failed because of engines that ended."""


class NoObserver:
    """Nobody wants to know."""

    def resumed(self, num_requests: int, num_tokens: int) -> None: ...

    def next_token(self, seconds: float) -> None: ...

    def given_up(self, num_requests: int) -> None: ...


class RestartBudget:
    """The engines that a request has lost. `limit`: how many it may lose in a row, without a token between them, and
    still go on."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num = 0
        self._num_without_token = 0
        """Deaths since the last token."""
        self._is_announced = False
        self._was_started = False
        self._has_token = False

    @property
    def is_suspect(self) -> bool:
        """Whether engines may have died of it."""
        least = min(SUSPECT_DEATHS, self._limit)
        return self._num > 0 and (self._num_without_token >= least or self._num >= least * PROGRESS_FACTOR)

    @property
    def asks_for_start(self) -> bool:
        """Whether the next engine has to say when it starts the request."""
        return self._num > 0

    def was_sent(self) -> None:
        """Record that the request was sent to its next engine."""
        self._is_announced = self.asks_for_start
        self._was_started = self._has_token = False

    def was_started(self, *, has_token: bool) -> None:
        """Record that its engine has started to compute it. `has_token`: it has brought a token as well."""
        self._was_started = True
        self._has_token |= has_token

    def charge(self, cause: str) -> EngineFailed | None:
        """Record that its engine has died. Return an error if the request may not go on."""
        if self._is_announced and not self._was_started:
            return None
        self._num += 1
        self._num_without_token = 1 if self._has_token else self._num_without_token + 1
        if self._num_without_token > self._limit:
            engines = "1 engine has" if self._num == 1 else f"{self._num_without_token} engines have"
            return EngineFailed(
                f"{cause}; {engines} ended with this request in flight, and `max_request_restarts` is {self._limit}"
            )
        if self._num > self._limit * PROGRESS_FACTOR:
            return EngineFailed(
                f"{cause}; {self._num} engines have ended with this request in flight, more than {PROGRESS_FACTOR} "
                f"times `max_request_restarts` ({self._limit})"
            )
        return None
