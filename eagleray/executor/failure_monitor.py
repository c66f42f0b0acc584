"""Failures of workers, reported from any thread; the first report is the cause."""

from __future__ import annotations

import threading
from collections.abc import Callable

from eagleray.errors import ChannelClosed, WorkerFailed, WorkerLost
from eagleray.messages.failure import Failure


class FailureMonitor:
    """Keeps the first report. `wake` is called then, so that a thread that waits for replies checks again."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._is_reported = threading.Event()
        self._error: Exception | None = None
        self._are_expected = False
        self._has_failed = False

    def report(self, label: str, cause: Failure) -> None:
        """Record that the worker `label` ended because of `cause`."""
        if not cause.is_exception:
            self._keep(WorkerLost(f"worker {label}: {cause}"))
        elif cause.is_user_error:
            self._keep(cause.as_user_error())
        else:
            # a closed channel follows from the exit of another worker, which may be reported later
            kind = WorkerLost if cause.kind == ChannelClosed.__name__ else WorkerFailed
            self._keep(kind(f"worker {label} ended: {cause}\n{cause.traceback}".rstrip()))

    def expect_exits(self) -> None:
        """Ignore exits from now on, because the workers are being stopped."""
        with self._lock:
            self._are_expected = True

    def mark_failed(self) -> None:
        """Note that a worker failed in a call: its peers may wait for it and will not notice that the queue closes."""
        self._has_failed = True

    @property
    def is_broken(self) -> bool:
        """Whether workers may be unable to stop by themselves."""
        return self._has_failed or self._error is not None

    def check(self) -> None:
        """Raise the first report, if there is one."""
        if self._error is not None:
            raise self._error

    def wait(self, seconds: float) -> bool:
        """Whether a report exists or arrives within `seconds`."""
        return self._is_reported.wait(seconds)

    def _keep(self, error: Exception) -> None:
        with self._lock:
            if self._error is not None or self._are_expected:
                return
            self._error = error
        self._is_reported.set()
        self._wake()
