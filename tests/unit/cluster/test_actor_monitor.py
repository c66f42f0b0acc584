"""Why an actor has exited."""

from __future__ import annotations

import pytest
from ray.exceptions import RayTaskError

from eagleray.cluster import actor_monitor
from eagleray.errors import WorkerLost


@pytest.mark.parametrize(
    ("cause", "has_traceback"), [(WorkerLost("worker 1: it was killed"), False), (ZeroDivisionError("of zero"), True)]
)
def test_exit_reason_of_an_exception_has_its_traceback_unless_it_is_our_own(cause, has_traceback, monkeypatch):
    def get(sentinel):
        raise RayTaskError("serve", "Traceback of the actor", cause)

    monkeypatch.setattr(actor_monitor.ray, "get", get)
    failure = actor_monitor.exit_reason(None, "node")
    assert (failure.kind, failure.message) == (type(cause).__name__, str(cause))
    assert bool(failure.traceback) is has_traceback
