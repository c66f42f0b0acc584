from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.errors import (
    CheckpointError,
    ClusterError,
    ClusterLost,
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    ProcessCrashed,
    WorkerLost,
)
from eagleray.fleet.restart_policy import EndInstance, GiveUp, Restart, RestartHistory, decide_restart
from eagleray.fleet.timeouts import STEADY_SECONDS
from eagleray.messages.failure import Failure

BUG = Failure.of(ZeroDivisionError("there is a bug"))
LOST_CLUSTER = Failure.of(ClusterError("the cluster cannot be reached"))
LOST_WORKER = Failure.of(WorkerLost("worker engine-0/tp1-pp0: it was killed by SIGKILL"))
RAY_ERROR = Failure(kind="RpcError", message="the control store is gone", library="ray")

KILLED = Failure.noticed("it was killed by SIGKILL")

OUTSIDE = [
    KILLED,
    LOST_WORKER,
    Failure.of(EngineFailed("the driver was silent for 10 s")),
    Failure.of(ClusterLost("a node is gone")),
    RAY_ERROR,
]
"""What an end from outside leaves behind."""


def ends(
    *worked: float | None,
    cause: Failure = KILLED,
    max_restarts: int | None = 100,
    max_delay: float = 30.0,
    before: RestartHistory | None = None,
    instance_has_served: bool = True,
):
    """Verdicts of ends one after another, each after so many seconds of work; None: it did not start."""
    history, verdicts = before or RestartHistory(), []
    for seconds in worked:
        history, verdict = decide_restart(
            history,
            worked=seconds,
            cause=cause,
            max_restarts=max_restarts,
            max_delay=max_delay,
            instance_has_served=instance_has_served,
        )
        verdicts.append(verdict)
    return verdicts


def delays(verdicts):
    return [verdict.delay for verdict in verdicts]


# Ends from outside.


def test_decide_starts_that_fail_wait_twice_as_long_each_time_up_to_the_limit():
    assert delays(ends(*[None] * 10)) == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert delays(ends(*[None] * 5, max_delay=1.0)) == [0.0, 0.5, 1.0, 1.0, 1.0]


def test_decide_killed_soon_after_its_start_waits_no_longer_than_the_first_delay():
    assert delays(ends(*[1.0] * 8)) == [0.0] + [0.5] * 7


def test_decide_long_work_forgets_the_ends_before():
    assert delays(ends(1.0, 1.0, None, None, 11.0, 1.0)) == [0.0, 0.5, 0.5, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("cause", OUTSIDE)
@pytest.mark.parametrize("worked", [None, 1.0])
def test_decide_ends_from_outside_are_followed_for_as_long_as_it_takes(cause, worked):
    assert all(isinstance(verdict, Restart) for verdict in ends(*[worked] * 200, cause=cause, max_restarts=1))


def test_decide_counts_the_starts_that_failed_for_the_log():
    verdicts = ends(1.0, None, None, None, 1.0, None)
    assert [verdict.failed_starts for verdict in verdicts] == [0, 1, 2, 3, 0, 1]


def test_decide_without_restarts_gives_up_at_any_end():
    assert ends(3600.0, max_restarts=0) == [GiveUp()]


def test_decide_lost_cluster_costs_patience_and_no_budget():
    has_served, _ = decide_restart(
        RestartHistory(), worked=1.0, cause=KILLED, max_restarts=1, max_delay=30.0, instance_has_served=True
    )
    verdicts = ends(*[None] * 20, cause=LOST_CLUSTER, max_restarts=1, before=has_served)
    assert delays(verdicts[:4]) == [0.5, 0.5, 1.0, 2.0]
    assert verdicts[-1] == Restart(30.0, 20)


# Failures of its own.


def test_decide_failures_at_work_spend_the_budget():
    assert ends(1.0, 1.0, 1.0, cause=BUG, max_restarts=2) == [Restart(0.0), Restart(0.5), GiveUp()]
    assert ends(1.0, 1.0, 11.0, 1.0, 1.0, cause=BUG, max_restarts=2)[-3:] == [Restart(0.0), Restart(0.5), GiveUp()]
    assert all(isinstance(verdict, Restart) for verdict in ends(*[1.0] * 50, cause=BUG, max_restarts=None))


@pytest.mark.parametrize("error", [ConfigError("x"), CheckpointError("x"), ClusterError("x")])
def test_decide_users_mistake_ends_an_instance_that_has_not_served(error):
    cause = Failure.of(error)
    assert ends(None, cause=cause, instance_has_served=False) == [EndInstance()]
    assert ends(None, cause=cause, instance_has_served=True) == [Restart(0.0, 1)]


@pytest.mark.parametrize("cause", [BUG, Failure.of(CheckpointError("model.safetensors: is truncated"))])
def test_decide_start_that_fails_twice_for_one_cause_is_not_tried_a_third_time(cause):
    assert ends(None, None, cause=cause) == [Restart(0.0, 1), GiveUp()]
    if not cause.is_user_error:
        assert ends(None, None, cause=cause, instance_has_served=False) == [Restart(0.0, 1), EndInstance()]


def test_decide_start_failures_that_differ_in_numbers_alone_are_one_cause():
    history = RestartHistory()
    for label, expected in (("engine-0", Restart(0.0, 1)), ("engine-0.1", EndInstance())):
        cause = Failure.of(RuntimeError(f"{label}/tp0-pp0: no room for 123{len(label)} bytes at 0x7f{len(label)}a"))
        history, verdict = decide_restart(
            history, worked=None, cause=cause, max_restarts=5, max_delay=30.0, instance_has_served=False
        )
        assert verdict == expected


def test_decide_start_failures_of_different_causes_spend_the_budget():
    history, verdicts = RestartHistory(), []
    for number in range(3):
        cause = BUG if number % 2 else Failure.of(OSError("no space left"))
        history, verdict = decide_restart(
            history, worked=None, cause=cause, max_restarts=2, max_delay=30.0, instance_has_served=False
        )
        verdicts.append(verdict)
    assert verdicts == [Restart(0.0, 1), Restart(0.5, 2), GiveUp()]


def test_decide_start_that_takes_too_long_is_tried_as_often_as_the_budget_says():
    slow = Failure.of(DeadlineExceeded("no ModelLoaded from rank 0 within 300 s"))
    assert ends(*[None] * 3, cause=slow, max_restarts=2, instance_has_served=False)[-1] == GiveUp()


ENDS = st.lists(
    st.tuples(
        st.sampled_from([None, 0.1, 3.0, STEADY_SECONDS, 3600.0]), st.sampled_from([*OUTSIDE, BUG, LOST_CLUSTER])
    ),
    max_size=40,
)


@given(story=ENDS, max_restarts=st.sampled_from([None, 1, 2, 5]), max_delay=st.sampled_from([1.0, 30.0]))
def test_decide_any_story_has_an_end_only_by_its_own_failures(story, max_restarts, max_delay):
    history, own_in_row, previous = RestartHistory(), 0, None
    for worked, cause in story:
        served_before = history.has_served or worked is not None
        is_own = cause is BUG or (cause is LOST_CLUSTER and not served_before)
        history, verdict = decide_restart(
            history,
            worked=worked,
            cause=cause,
            max_restarts=max_restarts,
            max_delay=max_delay,
            instance_has_served=True,
        )
        if worked is not None and worked >= STEADY_SECONDS:
            own_in_row = 0
        is_same_start = is_own and worked is None and previous == (None, cause)
        own_in_row += is_own
        is_spent = max_restarts is not None and own_in_row > max_restarts
        if is_same_start or (is_own and is_spent):
            assert verdict == GiveUp()
            return
        assert isinstance(verdict, Restart)
        assert 0 <= verdict.delay <= max_delay
        assert verdict.delay <= 0.5 or verdict.failed_starts > 1
        previous = (worked, cause)


CRASH = Failure.of(ProcessCrashed("it was killed by SIGSEGV"))


def test_decide_crash_in_two_starts_ends_an_instance_that_has_not_served():
    assert ends(None, None, cause=CRASH, instance_has_served=False) == [Restart(0.0, 1), EndInstance()]


def test_decide_crash_after_the_instance_has_served_is_followed_for_as_long_as_it_takes():
    for worked in (None, 1.0):
        verdicts = ends(*[worked] * 50, cause=CRASH, max_restarts=1, instance_has_served=True)
        assert all(isinstance(verdict, Restart) for verdict in verdicts)
