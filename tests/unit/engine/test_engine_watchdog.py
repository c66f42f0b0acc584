from __future__ import annotations

import queue
import threading

import pytest

from eagleray.engine.pipeline import AwaitedStep
from eagleray.engine.watchdog import LATE_SECONDS, StepTimer, Watchdog
from eagleray.messages.steps import StepPlan

TICK = 1.0


def awaited(step: int = 7, *, seconds: float = 60.0) -> AwaitedStep:
    plan = StepPlan(step=step, freed_rows=[], new_rows=[], new_blocks=[], rows=[0, 3], num_tokens=[1, 99])
    return AwaitedStep(plan, seconds)


def patience(*, grace: float = 5.0) -> StepTimer:
    return StepTimer(grace=grace, tick=TICK)


def looks(patience: StepTimer, one: AwaitedStep | None, start: int, end: int) -> list[float]:
    """What it says, looking once a tick from `start` up to `end`."""
    said = [patience.look(one, float(now)) for now in range(start, end + 1)]
    return [seconds for seconds in said if seconds is not None]


def test_a_step_is_overdue_after_its_limit_and_some_grace():
    one = patience()
    step = awaited()
    assert looks(one, step, 0, 65) == []
    assert one.look(step, 66.0) == 66.0


def test_time_between_steps_counts_for_none_of_them():
    one = patience()
    assert looks(one, awaited(0), 0, 40) == []
    assert looks(one, None, 41, 200) == []
    assert looks(one, awaited(1), 201, 260) == []
    assert looks(one, awaited(2), 261, 320) == []


def test_equal_steps_are_told_apart():
    one = patience()
    assert looks(one, awaited(0), 0, 40) == looks(one, awaited(0), 41, 100) == []


def test_time_in_which_this_process_did_not_run_is_not_held_against_the_step():
    one = patience()
    step = awaited()
    assert looks(one, step, 0, 50) == []
    assert one.look(step, 5000.0) is None
    assert looks(one, step, 5001, 5065) == []
    assert one.look(step, 5066.0) == 66.0


def test_a_look_that_is_a_little_late_changes_nothing():
    one = patience()
    step = awaited()
    assert looks(one, step, 0, 65) == []
    assert one.look(step, 65.0 + TICK + LATE_SECONDS) == 67.0


def test_what_hangs_is_named_once_from_another_thread():
    said: queue.Queue[tuple[Exception, int]] = queue.Queue()
    step = awaited(seconds=0.02)
    watchdog = Watchdog(
        lambda: step, on_hang=lambda error: said.put((error, threading.get_ident())), grace=0.01, tick=0.01
    )
    error, thread = said.get(timeout=30)
    watchdog.close()
    assert str(error).startswith("step 7 (100 tokens in 2 rows) hangs for 0 s now; its limit is 0 s")
    assert thread != threading.get_ident()
    assert said.empty()


def test_a_closed_watchdog_looks_no_more():
    def look() -> None:
        looked.set()

    looked = threading.Event()
    watchdog = Watchdog(look, on_hang=lambda error: pytest.fail("nothing hangs"), tick=0.01)
    assert looked.wait(30)
    watchdog.close()
    looked.clear()
    assert not looked.wait(0.1)
