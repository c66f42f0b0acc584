"""Targets of the processes that `test_spawn.py` spawns."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

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


def use_descriptors(payload: bytes, parent: Parent) -> None:
    """Write to the descriptor of the number `payload` and to standard streams; report the file of standard input."""
    os.write(int(payload), b"to the pipe")
    print("to stdout")
    print("to stderr", file=sys.stderr)
    parent.report_bound(os.readlink("/proc/self/fd/0"))


def exit_with_work_left(payload: bytes, parent: Parent) -> None:
    """Exit with the code 3 while a thread, an exit handler and a stream have something to write. `payload` is the
    descriptor that the first two write to."""
    number = int(payload)

    def write_when_main_thread_has_ended() -> None:
        threading.main_thread().join()
        os.write(number, b"thread, ")

    atexit.register(os.write, number, b"handler")
    threading.Thread(target=write_when_main_thread_has_ended).start()
    print("stream", end="")
    sys.exit(3)


def describe_yourself(payload: bytes, parent: Parent) -> None:
    """Report what a fork could have from the process that it was forked from."""
    state = {
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "blocked": [signal.Signals(number).name for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "threads": [thread.name for thread in threading.enumerate()],
        "modules": [name for name in ("torch", "zmq") if name in sys.modules],
    }
    parent.report_bound(json.dumps(state))


def draw(payload: bytes, parent: Parent) -> None:
    """Report numbers from the random state of this process."""
    import random
    import uuid
    from multiprocessing import current_process

    import numpy

    key = bytes(current_process().authkey).hex()
    parent.report_bound(json.dumps([random.random(), float(numpy.random.random()), uuid.uuid4().hex, key]))


def import_random(payload: bytes, parent: Parent) -> None:
    import random

    parent.report_bound(random.__file__)


def fork_children(payload: bytes, parent: Parent) -> None:
    """Run two children by this process's fork server, if it has one; report how many were forks, how they exited, and
    the processes that are left."""
    pids: list[int] = []
    exits: list[str] = []

    class Counted:
        def fork(self, *args) -> int:
            pids.append(parent.fork_server.fork(*args))
            return pids[-1]

    for index in range(2):
        child = Child(
            target="children:report",
            member=ClientId("test", index),
            payload=b"",
            log=LogSettings(),
            runtime_dir="",
            on_message=lambda message: None,
            on_exit=lambda cause: exits.append(cause.message),
            fork_server=Counted() if parent.fork_server is not None else None,
        )
        child.wait(20.0)
    if parent.fork_server is not None:
        parent.fork_server.close()
    left = [path.read_text() for path in Path(f"/proc/{os.getpid()}/task").glob("*/children")]
    parent.report_bound(json.dumps({"forked": len(pids), "exits": exits, "left": "".join(left).split()}))
