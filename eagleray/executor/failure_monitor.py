"""What those who watch workers report: from any thread, about any worker; the first report is the cause."""

from __future__ import annotations

import threading
from collections.abc import Callable

from eagleray.errors import ChannelClosed, WorkerFailed, WorkerLost
from eagleray.messages.failure import Failure

PEER_EXIT_SECONDS = 3.0
"""When one that had to do with a worker says that it is gone: how long to wait for who knows why. Ray takes 2 s to
notice that a whole host is."""


class FailureMonitor:
    """`wake` is called on the first report: whoever waits for the workers shall look again."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._is_reported = threading.Event()
        self._error: Exception | None = None
        self._are_expected = False
        self._has_failed = False

    def report(self, label: str, reason: str | Failure) -> None:
        """The worker `label` is gone; a `Failure` is what it has said of that itself."""
        match reason:
            case str():
                self._take(WorkerLost(f"worker {label}: {reason}"))
            case Failure(is_user_error=True):
                self._take(reason.as_user_error())
            case _:
                # a closed channel is the end of another worker, which may be reported later
                kind = WorkerLost if reason.kind == ChannelClosed.__name__ else WorkerFailed
                self._take(kind(f"worker {label} ended: {reason}\n{reason.traceback}".rstrip()))

    def expect(self) -> None:
        """From now on workers end because they were told to."""
        with self._lock:
            self._are_expected = True

    def mark_failed(self) -> None:
        """A worker has failed in a call: the others may wait for it, and will not hear that they are to end."""
        self._has_failed = True

    @property
    def is_broken(self) -> bool:
        """The workers are no longer able to end by themselves."""
        return self._has_failed or self._error is not None

    def check(self) -> None:
        """Raises the first report, every time."""
        if self._error is not None:
            raise self._error

    def wait(self, seconds: float) -> bool:
        """Whether there is a report within so many seconds."""
        return self._is_reported.wait(seconds)

    def _take(self, error: Exception) -> None:
        with self._lock:
            if self._error is not None or self._are_expected:
                return
            self._error = error
        self._is_reported.set()
        self._wake()
