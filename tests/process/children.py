"""Targets of the processes that `test_spawn.py` spawns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from eagleray.errors import CheckpointError
from eagleray.identity import ClientId
from eagleray.log import LogSettings
from eagleray.process.parent import Parent
from eagleray.process.spawn import Child


def report(payload: bytes, parent: Parent) -> None:
    parent.report_bound(payload.decode())


def fail(payload: bytes, parent: Parent) -> None:
    raise CheckpointError("the file is broken")


def crash(payload: bytes, parent: Parent) -> None:
    with parent.reporting_failure():
        raise ZeroDivisionError("there is a bug")


def leave_a_fork(payload: bytes, parent: Parent) -> None:
    """Exit while a fork holds this process's end of the socket pair."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_yourself(payload: bytes, parent: Parent) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def signal_yourself(payload: bytes, parent: Parent) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(os.getpid(), number)
    parent.report_bound("alive")


def leave_a_program(payload: bytes, parent: Parent) -> None:
    """Exit while a program that this process started goes on."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    parent.report_bound(str(program.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def wait(payload: bytes, parent: Parent) -> None:
    parent.report_bound(str(os.getpid()))
    time.sleep(600)


def have_a_child(payload: bytes, parent: Parent) -> None:
    """Report the process id of a child of this process."""
    Child(
        target="children:wait",
        member=ClientId("test", 1),
        payload=b"",
        log=LogSettings(),
        runtime_dir=payload.decode(),
        on_message=lambda message: parent.report_bound(message.address),
        on_exit=lambda cause: None,
    )
    time.sleep(600)


def import_random(payload: bytes, parent: Parent) -> None:
    import random

    parent.report_bound(random.__file__)
