from __future__ import annotations

import pytest

from eagleray.errors import CheckpointError, ClusterError, ConfigError, WorkerLost
from eagleray.fleet.recovery import Again, EndInstance, GiveUp, History, decide
from eagleray.messages.failure import Failure

BUG = Failure.of(ZeroDivisionError("there is a bug"))
LOST_CLUSTER = Failure.of(ClusterError("the cluster cannot be reached"))


def ends(
    *worked: float | None,
    failure: Failure | None = None,
    max_restarts: int = 100,
    before: History | None = None,
):
    """Verdicts of ends one after another, each after so many seconds of work; None: it did not start."""
    history, verdicts = before or History(), []
    for seconds in worked:
        history, verdict = decide(
            history, worked=seconds, failure=failure, max_restarts=max_restarts, instance_has_served=True
        )
        verdicts.append(verdict)
    return verdicts


def test_the_first_restart_is_at_once_and_the_delay_doubles_up_to_half_a_minute():
    delays = [verdict.delay for verdict in ends(*[1.0] * 10)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_who_has_worked_starts_afresh():
    assert ends(1.0, 1.0, 1.0, 11.0, 1.0) == [Again(0.0), Again(0.5), Again(1.0), Again(0.0), Again(0.5)]


def test_the_budget_counts_restarts_in_a_row():
    assert ends(None, None, None, max_restarts=2) == [Again(0.0), Again(0.5), GiveUp()]
    assert ends(1.0, 1.0, 11.0, 1.0, 1.0, max_restarts=2)[-3:] == [Again(0.0), Again(0.5), GiveUp()]
    assert ends(3600.0, max_restarts=0) == [GiveUp()]


@pytest.mark.parametrize("error", [ConfigError("x"), CheckpointError("x"), ClusterError("x")])
def test_a_users_mistake_ends_an_instance_that_has_not_served(error):
    def verdict(instance_has_served: bool):
        return decide(
            History(),
            worked=None,
            failure=Failure.of(error),
            max_restarts=5,
            instance_has_served=instance_has_served,
        )[1]

    assert verdict(False) == EndInstance()
    assert verdict(True) == Again(0.0)


@pytest.mark.parametrize("failure", [None, BUG, Failure.of(WorkerLost("gone"))])
def test_what_may_go_well_the_next_time_is_tried_again_before_the_instance_has_served(failure):
    _, verdict = decide(History(), worked=None, failure=failure, max_restarts=5, instance_has_served=False)
    assert verdict == Again(0.0)


def test_a_lost_cluster_costs_patience_and_no_budget():
    (again,) = ends(1.0, max_restarts=1)
    assert again == Again(0.0)
    has_served, _ = decide(History(), worked=1.0, failure=None, max_restarts=1, instance_has_served=True)
    verdicts = ends(*[None] * 20, failure=LOST_CLUSTER, max_restarts=1, before=has_served)
    assert verdicts[:3] == [Again(0.5), Again(1.0), Again(2.0)]
    assert verdicts[-1] == Again(30.0)


def test_a_cluster_that_never_held_the_engine_is_no_excuse():
    assert ends(None, None, failure=LOST_CLUSTER, max_restarts=1) == [Again(0.0), GiveUp()]
