from __future__ import annotations

import queue
import threading

import pytest

from eagleray.engine.core import AwaitedStep
from eagleray.engine.watchdog import WATCHDOG_LATE_SECONDS, StepTimer, Watchdog
from eagleray.messages.steps import StepPlan

TICK = 1.0


def awaited(step: int = 7, *, seconds: float = 60.0) -> AwaitedStep:
    plan = StepPlan(step=step, freed_rows=[], new_rows=[], new_blocks=[], rows=[0, 3], num_tokens=[1, 99])
    return AwaitedStep(plan, seconds)


def make_timer(*, grace: float = 5.0) -> StepTimer:
    return StepTimer(grace=grace, tick=TICK)


def checks(timer: StepTimer, step: AwaitedStep | None, start: int, end: int) -> list[float]:
    """Return the results of a check at every tick from `start` up to `end`."""
    overdue = [timer.check(step, float(now)) for now in range(start, end + 1)]
    return [seconds for seconds in overdue if seconds is not None]


def test_step_timer_beyond_limit_and_grace_is_overdue():
    timer = make_timer()
    step = awaited()
    assert checks(timer, step, 0, 65) == []
    assert timer.check(step, 66.0) == 66.0


def test_step_timer_time_between_steps_does_not_count():
    timer = make_timer()
    assert checks(timer, awaited(0), 0, 40) == []
    assert checks(timer, None, 41, 200) == []
    assert checks(timer, awaited(1), 201, 260) == []
    assert checks(timer, awaited(2), 261, 320) == []


def test_step_timer_equal_steps_are_distinguished():
    timer = make_timer()
    assert checks(timer, awaited(0), 0, 40) == checks(timer, awaited(0), 41, 100) == []


def test_step_timer_stopped_process_resets_the_clock():
    timer = make_timer()
    step = awaited()
    assert checks(timer, step, 0, 50) == []
    assert timer.check(step, 5000.0) is None
    assert checks(timer, step, 5001, 5065) == []
    assert timer.check(step, 5066.0) == 66.0


def test_step_timer_slightly_late_check_keeps_the_clock():
    timer = make_timer()
    step = awaited()
    assert checks(timer, step, 0, 65) == []
    assert timer.check(step, 65.0 + TICK + WATCHDOG_LATE_SECONDS) == 67.0


def test_watchdog_hung_step_is_reported_once():
    said: queue.Queue[tuple[Exception, int]] = queue.Queue()
    step = awaited(seconds=0.02)
    watchdog = Watchdog(
        lambda: step, on_hang=lambda error: said.put((error, threading.get_ident())), grace=0.01, tick=0.01
    )
    error, thread = said.get(timeout=30)
    watchdog.close()
    assert str(error).startswith("step 7 (100 tokens in 2 rows) has been hanging for 0 s; its limit is 0 s")
    assert thread != threading.get_ident()
    assert said.empty()


def test_watchdog_closed_stops_polling():
    def look() -> None:
        looked.set()

    looked = threading.Event()
    watchdog = Watchdog(look, on_hang=lambda error: pytest.fail("nothing hangs"), tick=0.01)
    assert looked.wait(30)
    watchdog.close()
    looked.clear()
    assert not looked.wait(0.1)
