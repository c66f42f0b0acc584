"""Waiting for the cluster, visibly."""

from __future__ import annotations

import time
from collections.abc import Callable

from eagleray.errors import ClusterError
from eagleray.log import get_logger

logger = get_logger(__name__)

PROGRESS_SECONDS = 5.0
LOOK_SECONDS = 0.05


class Deadline:
    """A loop's patience: `again` after each look that found nothing yet. Logs every few seconds what is missing.

    `option` is the one that sets the limit, for the error. `check` is called at each look: what it raises ends the
    wait.
    """

    def __init__(self, seconds: float, option: str, check: Callable[[], None] = lambda: None) -> None:
        self._option = option
        self._check = check
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        self._progress_due = self._began + PROGRESS_SECONDS

    @property
    def left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def again(self, what: Callable[[], str]) -> None:
        """Pause. `what` is still missing; raises `ClusterError` with it once the time is over."""
        self.note(what)
        time.sleep(LOOK_SECONDS)

    def note(self, what: Callable[[], str]) -> None:
        """As `again`, for a look that has taken its time already."""
        self._check()
        now = time.monotonic()
        waited = now - self._began
        if now >= self._deadline:
            raise ClusterError(f"{what()}; waited {waited:.0f} s (`{self._option}`)")
        if now >= self._progress_due:
            logger.info("waiting for %.0f s: %s", waited, what())
            self._progress_due = now + PROGRESS_SECONDS
