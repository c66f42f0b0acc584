"""Deadline of a wait for the cluster, with log lines about missing resources."""

from __future__ import annotations

import time
from collections.abc import Callable

from eagleray.cluster.timeouts import POLL_INTERVAL_SECONDS, PROGRESS_SECONDS
from eagleray.errors import ClusterError
from eagleray.log import get_logger

logger = get_logger(__name__)


class Deadline:
    """Deadline of a polling loop, which calls `poll` after each look that found nothing yet.

    `option` is the option that sets the limit, for the error. `interrupt` is called at each look; if it raises, the
    wait ends.
    """

    def __init__(self, seconds: float, option: str, interrupt: Callable[[], None] = lambda: None) -> None:
        self._option = option
        self._interrupt = interrupt
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        self._progress_due = self._began + PROGRESS_SECONDS

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def poll(self, describe: Callable[[], str]) -> None:
        """`check`, then pause."""
        self.check(describe)
        time.sleep(POLL_INTERVAL_SECONDS)

    def check(self, describe: Callable[[], str]) -> None:
        """Log every few seconds the text of `describe`, which names the missing thing.

        Raises `ClusterError` with that text after the deadline.
        """
        self._interrupt()
        now = time.monotonic()
        waited = now - self._began
        if now >= self._deadline:
            raise ClusterError(f"{describe()}; waited {waited:.0f} s (`{self._option}`)")
        if now >= self._progress_due:
            logger.info("waiting for %.0f s: %s", waited, describe())
            self._progress_due = now + PROGRESS_SECONDS
