"""The watchdog: notices when the engine's own process hangs in a step.

That workers do not answer is the executor's to notice, at the step's limit. But a step may hang in this very process,
where nobody but another thread can notice it. The thread looks, every second, at what the engine waits for; the engine
itself pays nothing for it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from time import monotonic

from eagleray.engine.pipeline import AwaitedStep
from eagleray.errors import DeadlineExceeded

GRACE_SECONDS = 5.0
"""Beyond a step's limit, at which the executor gives up by itself."""

TICK_SECONDS = 1.0

LATE_SECONDS = 1.0
"""A look that comes later than this: the process did not run."""

CLOSE_SECONDS = 5.0


class StepTimer:
    """For how long one and the same step was waited for. Pure: the time is handed in.

    Time in which this process did not run (it was stopped, or the machine was) is not held against the step: when a
    look comes late, its clock starts again.
    """

    def __init__(self, *, grace: float, tick: float) -> None:
        self._grace = grace
        self._tick = tick
        self._looked = -math.inf
        self._awaited: AwaitedStep | None = None
        self._since = 0.0

    def look(self, awaited: AwaitedStep | None, now: float) -> float | None:
        """Seconds that `awaited` has taken, if they are too many. To be asked every `tick` seconds."""
        is_late = now - self._looked > self._tick + LATE_SECONDS
        self._looked = now
        if awaited is not self._awaited or is_late:
            self._awaited, self._since = awaited, now
        if awaited is None or now - self._since <= awaited.seconds + self._grace:
            return None
        return now - self._since


class Watchdog:
    """Its thread asks `awaited`, every `tick` seconds, and calls `on_hang`, once, for a step that hangs."""

    def __init__(
        self,
        awaited: Callable[[], AwaitedStep | None],
        *,
        on_hang: Callable[[DeadlineExceeded], None],
        grace: float = GRACE_SECONDS,
        tick: float = TICK_SECONDS,
    ) -> None:
        self._awaited = awaited
        self._on_hang = on_hang
        self._patience = StepTimer(grace=grace, tick=tick)
        self._tick = tick
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody is called any more."""
        self._is_closed.set()
        self._thread.join(CLOSE_SECONDS)

    def _watch(self) -> None:
        while not self._is_closed.wait(self._tick):
            awaited = self._awaited()
            seconds = self._patience.look(awaited, monotonic())
            if awaited is not None and seconds is not None:
                limit = f"its limit is {awaited.seconds:.0f} s, see option `watchdog_timeout`"
                self._on_hang(DeadlineExceeded(f"{awaited.plan.label} hangs for {seconds:.0f} s now; {limit}"))
                return
