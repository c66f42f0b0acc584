"""The watchdog: a thread that detects a step that hangs in the engine's own process.

The executor notices workers that do not reply, at the step's time limit. A step that hangs in the engine's own process
can be noticed only by another thread, which checks every second what the engine waits for. The engine's thread pays
nothing for it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from time import monotonic

from eagleray.engine.core import AwaitedStep
from eagleray.engine.timeouts import (
    WATCHDOG_LATE_SECONDS,
    WATCHDOG_MARGIN_SECONDS,
    WATCHDOG_STOP_SECONDS,
    WATCHDOG_TICK_SECONDS,
)
from eagleray.errors import DeadlineExceeded


class StepTimer:
    """Measures how long the engine has waited for one step. Pure: callers pass the time.

    Time in which this process did not run (because it or the machine was stopped) does not count: when a check is late,
    the clock of the step is reset.
    """

    def __init__(self, *, grace: float, tick: float) -> None:
        self._grace = grace
        self._tick = tick
        self._checked_at = -math.inf
        self._awaited: AwaitedStep | None = None
        self._since = 0.0

    def check(self, awaited: AwaitedStep | None, now: float) -> float | None:
        """Return the seconds that `awaited` has taken if they exceed its limit. Called every `tick` seconds."""
        is_late = now - self._checked_at > self._tick + WATCHDOG_LATE_SECONDS
        self._checked_at = now
        if awaited is not self._awaited or is_late:
            self._awaited, self._since = awaited, now
        if awaited is None or now - self._since <= awaited.seconds + self._grace:
            return None
        return now - self._since


class Watchdog:
    """Polls `awaited` every `tick` seconds from a thread and calls `on_hang` once for a step that hangs."""

    def __init__(
        self,
        awaited: Callable[[], AwaitedStep | None],
        *,
        on_hang: Callable[[DeadlineExceeded], None],
        grace: float = WATCHDOG_MARGIN_SECONDS,
        tick: float = WATCHDOG_TICK_SECONDS,
    ) -> None:
        self._awaited = awaited
        self._on_hang = on_hang
        self._timer = StepTimer(grace=grace, tick=tick)
        self._tick = tick
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; `on_hang` is not called afterwards."""
        self._is_closed.set()
        self._thread.join(WATCHDOG_STOP_SECONDS)

    def _watch(self) -> None:
        while not self._is_closed.wait(self._tick):
            awaited = self._awaited()
            seconds = self._timer.check(awaited, monotonic())
            if awaited is not None and seconds is not None:
                limit = f"its limit is {awaited.seconds:.0f} s, see option `watchdog_timeout`"
                self._on_hang(DeadlineExceeded(f"{awaited.plan.label} has been hanging for {seconds:.0f} s; {limit}"))
                return
