"""The log of an actor that ends with an exception."""

from __future__ import annotations

import logging

import pytest

from eagleray.cluster.actor_process import ActorProcess
from eagleray.errors import WorkerLost


class LabelledProcess(ActorProcess):
    """An actor outside of Ray that leaves this process unchanged."""

    def __init__(self) -> None:
        self._label = "engine-0"


def lose_worker(payload: bytes) -> None:
    raise WorkerLost("worker 1: it was killed")


def fail(payload: bytes) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("target", "error", "level"), [(lose_worker, WorkerLost, "DEBUG"), (fail, ZeroDivisionError, "ERROR")]
)
def test_actor_process_exception_of_our_own_has_its_traceback_at_debug_level(target, error, level, caplog):
    with caplog.at_level(logging.DEBUG, "eagleray"), pytest.raises(error):
        LabelledProcess().run(f"{__name__}:{target.__name__}", b"")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [(level, "engine-0 ended")]
    assert "Traceback" in caplog.text
