from __future__ import annotations

import json
import queue
from pathlib import Path

import pytest

from eagleray.identity import ClientId
from eagleray.log import LogSettings
from eagleray.process.spawn import Child
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

SECONDS = 30.0


@pytest.fixture(autouse=True, scope="session")
def forks(forked_programs):
    """Have engines and workers of these tests forked."""


@pytest.fixture
def runtime_dir():
    path = make_runtime_dir()
    yield path
    remove_runtime_dir(path)


@pytest.fixture
def spawn_queue_child(monkeypatch):
    """Return a function that starts a process of `queue_children.py` and returns it with a queue of its reports."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    children = []

    def spawn(function: str, **said) -> tuple[Child, queue.Queue]:
        reports: queue.Queue = queue.Queue()
        child = Child(
            target=f"queue_children:{function}",
            member=ClientId("test", 0),
            payload=json.dumps(said).encode(),
            log=LogSettings(),
            runtime_dir="/nonexistent",
            on_message=lambda message: reports.put(getattr(message, "address", message)),
            on_exit=lambda cause: reports.put(cause.message),
        )
        children.append(child)
        return child, reports

    yield spawn
    for child in children:
        child.kill()
        assert child.wait(SECONDS)
