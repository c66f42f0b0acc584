from __future__ import annotations

import os
import resource
import signal
import threading

import pytest

from eagleray.process.command_line import show_command_line
from eagleray.process.inherited_state import read_inherited_state


@pytest.fixture
def restored():
    """Restore what the tests change and `monkeypatch` does not."""
    limit, umask = resource.getrlimit(resource.RLIMIT_CORE), os.umask(0o022)
    os.umask(umask)
    yield
    os.umask(umask)
    resource.setrlimit(resource.RLIMIT_CORE, limit)


CHANGES = {
    "environment": lambda monkeypatch, path: monkeypatch.setenv("EAGLERAY_TEST", "1"),
    "import path": lambda monkeypatch, path: monkeypatch.syspath_prepend(path),
    "interpreter": lambda monkeypatch, path: monkeypatch.setattr("sys.executable", "/usr/bin/another"),
    "directory": lambda monkeypatch, path: monkeypatch.chdir(path),
    "umask": lambda monkeypatch, path: os.umask(0o123),
}


@pytest.mark.parametrize("change", CHANGES)
def test_read_inherited_state_changes_with(restored, monkeypatch, tmp_path, change):
    before = read_inherited_state()
    assert read_inherited_state() == before
    CHANGES[change](monkeypatch, tmp_path)
    assert read_inherited_state() != before


def test_read_inherited_state_changes_with_limits(restored):
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard == 0:
        pytest.skip("the limit cannot be changed here")
    before = read_inherited_state()
    resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else 4096, hard))
    assert read_inherited_state() != before


def test_read_inherited_state_is_that_of_the_thread():
    states = [read_inherited_state()]

    def run(*calls) -> None:
        for call in calls:
            call()
        states.append(read_inherited_state())

    for calls in (
        [],
        [lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])],
        [lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)],
    ):
        thread = threading.Thread(target=run, args=calls)
        thread.start()
        thread.join()
    assert [state == states[0] for state in states] == [True, True, False, False]


def test_show_command_line_too_long_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        show_command_line(["x" * 1_000_000])
