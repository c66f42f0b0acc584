"""What the deaths of engines mean to a request: how often it goes on elsewhere, and when it is a suspect. Pure.

A request that kills engines must fail, and alone. One that was merely beside it is charged too at first, since nobody
knows which one it was; from the second death on both are suspects, which engines run one at a time and announce. From
then on only the one that was running is charged.
"""

from __future__ import annotations

from typing import Protocol

from eagleray.errors import EngineFailed

__all__ = ["Deaths", "NoObserver", "RecoveryObserver"]

SUSPECT_DEATHS = 2


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


class Deaths:
    """The engines that a request has lost. `limit`: how many it may lose and still go on."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num = 0
        self._was_started = False

    @property
    def is_suspect(self) -> bool:
        """It may be what the engines died of."""
        return 0 < self._num >= min(SUSPECT_DEATHS, self._limit)

    def was_sent(self) -> None:
        """To the next engine."""
        self._was_started = False

    def was_started(self) -> None:
        """That engine computes it."""
        self._was_started = True

    def charge(self, cause: str) -> EngineFailed | None:
        """That engine has died. Says so if the request may not go on."""
        if self._was_started or not self.is_suspect:
            self._num += 1
        if self._num <= self._limit:
            return None
        engines = "1 engine has" if self._num == 1 else f"{self._num} engines have"
        return EngineFailed(
            f"{cause}; {engines} ended with this request in flight, and `max_request_restarts` is {self._limit}"
        )
