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
"""Causes from outside of the process."""


def decisions(
    *uptime: float | None,
    cause: Failure = KILLED,
    max_restarts: int | None = 100,
    max_delay: float = 30.0,
    before: RestartHistory | None = None,
    instance_has_served: bool = True,
):
    """Return the decisions after exits in a row, each after these seconds of work; None for an incomplete start."""
    history, results = before or RestartHistory(), []
    for seconds in uptime:
        history, decision = decide_restart(
            history,
            uptime=seconds,
            cause=cause,
            max_restarts=max_restarts,
            max_delay=max_delay,
            instance_has_served=instance_has_served,
        )
        results.append(decision)
    return results


def delays(results):
    return [decision.delay for decision in results]


# Causes from outside


def test_decide_restart_failed_starts_double_the_delay_up_to_the_limit():
    assert delays(decisions(*[None] * 10)) == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert delays(decisions(*[None] * 5, max_delay=1.0)) == [0.0, 0.5, 1.0, 1.0, 1.0]


def test_decide_restart_killed_soon_after_start_has_first_delay():
    assert delays(decisions(*[1.0] * 8)) == [0.0] + [0.5] * 7


def test_decide_restart_steady_work_clears_history():
    assert delays(decisions(1.0, 1.0, None, None, 11.0, 1.0)) == [0.0, 0.5, 0.5, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("cause", OUTSIDE)
@pytest.mark.parametrize("uptime", [None, 1.0])
def test_decide_restart_cause_from_outside_restarts_forever(cause, uptime):
    assert all(isinstance(decision, Restart) for decision in decisions(*[uptime] * 200, cause=cause, max_restarts=1))


def test_decide_restart_counts_failed_starts():
    results = decisions(1.0, None, None, None, 1.0, None)
    assert [decision.failed_starts for decision in results] == [0, 1, 2, 3, 0, 1]


def test_decide_restart_max_restarts_zero_gives_up():
    assert decisions(3600.0, max_restarts=0) == [GiveUp()]


def test_decide_restart_lost_cluster_is_delayed_without_budget():
    has_served, _ = decide_restart(
        RestartHistory(), uptime=1.0, cause=KILLED, max_restarts=1, max_delay=30.0, instance_has_served=True
    )
    results = decisions(*[None] * 20, cause=LOST_CLUSTER, max_restarts=1, before=has_served)
    assert delays(results[:4]) == [0.5, 0.5, 1.0, 2.0]
    assert results[-1] == Restart(30.0, 20)


# Exceptions of the process itself


def test_decide_restart_failures_at_work_spend_the_budget():
    assert decisions(1.0, 1.0, 1.0, cause=BUG, max_restarts=2) == [Restart(0.0), Restart(0.5), GiveUp()]
    assert decisions(1.0, 1.0, 11.0, 1.0, 1.0, cause=BUG, max_restarts=2)[-3:] == [Restart(0.0), Restart(0.5), GiveUp()]
    assert all(isinstance(decision, Restart) for decision in decisions(*[1.0] * 50, cause=BUG, max_restarts=None))


@pytest.mark.parametrize("error", [ConfigError("x"), CheckpointError("x"), ClusterError("x")])
def test_decide_restart_user_error_before_serving_ends_instance(error):
    cause = Failure.of(error)
    assert decisions(None, cause=cause, instance_has_served=False) == [EndInstance()]
    assert decisions(None, cause=cause, instance_has_served=True) == [Restart(0.0, 1)]


@pytest.mark.parametrize("cause", [BUG, Failure.of(CheckpointError("model.safetensors: is truncated"))])
def test_decide_restart_same_start_failure_twice_gives_up(cause):
    assert decisions(None, None, cause=cause) == [Restart(0.0, 1), GiveUp()]
    if not cause.is_user_error:
        assert decisions(None, None, cause=cause, instance_has_served=False) == [Restart(0.0, 1), EndInstance()]


def test_decide_restart_start_failures_differ_in_numbers_are_equal():
    history = RestartHistory()
    for label, expected in (("engine-0", Restart(0.0, 1)), ("engine-0.1", EndInstance())):
        cause = Failure.of(RuntimeError(f"{label}/tp0-pp0: no room for 123{len(label)} bytes at 0x7f{len(label)}a"))
        history, decision = decide_restart(
            history, uptime=None, cause=cause, max_restarts=5, max_delay=30.0, instance_has_served=False
        )
        assert decision == expected


def test_decide_restart_different_start_failures_spend_the_budget():
    history, results = RestartHistory(), []
    for number in range(3):
        cause = BUG if number % 2 else Failure.of(OSError("no space left"))
        history, decision = decide_restart(
            history, uptime=None, cause=cause, max_restarts=2, max_delay=30.0, instance_has_served=False
        )
        results.append(decision)
    assert results == [Restart(0.0, 1), Restart(0.5, 2), GiveUp()]


def test_decide_restart_start_timeout_spends_the_budget():
    slow = Failure.of(DeadlineExceeded("no ModelLoaded from rank 0 within 300 s"))
    assert decisions(*[None] * 3, cause=slow, max_restarts=2, instance_has_served=False)[-1] == GiveUp()


EXITS = st.lists(
    st.tuples(
        st.sampled_from([None, 0.1, 3.0, STEADY_SECONDS, 3600.0]), st.sampled_from([*OUTSIDE, BUG, LOST_CLUSTER])
    ),
    max_size=40,
)


@given(exits=EXITS, max_restarts=st.sampled_from([None, 1, 2, 5]), max_delay=st.sampled_from([1.0, 30.0]))
def test_decide_restart_any_history_gives_up_only_for_own_failures(exits, max_restarts, max_delay):
    history, own_in_row, previous = RestartHistory(), 0, None
    for uptime, cause in exits:
        served_before = history.has_served or uptime is not None
        is_own = cause is BUG or (cause is LOST_CLUSTER and not served_before)
        history, decision = decide_restart(
            history,
            uptime=uptime,
            cause=cause,
            max_restarts=max_restarts,
            max_delay=max_delay,
            instance_has_served=True,
        )
        if uptime is not None and uptime >= STEADY_SECONDS:
            own_in_row = 0
        is_same_start = is_own and uptime is None and previous == (None, cause)
        own_in_row += is_own
        is_spent = max_restarts is not None and own_in_row > max_restarts
        if is_same_start or (is_own and is_spent):
            assert decision == GiveUp()
            return
        assert isinstance(decision, Restart)
        assert 0 <= decision.delay <= max_delay
        assert decision.delay <= 0.5 or decision.failed_starts > 1
        previous = (uptime, cause)


CRASH = Failure.of(ProcessCrashed("it was killed by SIGSEGV"))


def test_decide_restart_crash_in_two_starts_before_serving_ends_instance():
    assert decisions(None, None, cause=CRASH, instance_has_served=False) == [Restart(0.0, 1), EndInstance()]


def test_decide_restart_crash_after_serving_restarts_forever():
    for uptime in (None, 1.0):
        results = decisions(*[uptime] * 50, cause=CRASH, max_restarts=1, instance_has_served=True)
        assert all(isinstance(decision, Restart) for decision in results)
