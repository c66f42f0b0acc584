"""A Ray cluster of one node that this process has started: its directory, its end, and the watch over its processes.

Owned by the `Connection` to it. The watch is a thread: when the raylet or the control store has died it ends this
process, because nothing helps a driver then. Ray itself lets a driver without a raylet live, and ends one without a
control store a minute later and without a word.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import ray

from eagleray.cluster.cleanup import remove_with_process
from eagleray.errors import ClusterLost, EagleRayError
from eagleray.log import get_logger
from eagleray.process.spawn import explain_exit
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

logger = get_logger(__name__)

OnLost = Callable[[ClusterLost], None]
"""Called from a thread with the cause, just before this process ends because of it."""

LOOK_SECONDS = 0.2
END_SECONDS = 5.0

MAX_DIR_LENGTH = 45
"""Ray's longest socket path has 62 bytes beyond its directory, of the 107 that a Unix socket's path may have."""

VITAL = {"raylet": "raylet", "gcs_server": "control store"}
"""Names of the processes without which there is no cluster, and what they are."""


class LocalCluster:
    """Made before `ray.init`, which is to use `directory`. Whoever has it closes it.

    The directory holds the logs and sockets of the cluster, and is removed with it; if this process is killed, the
    processes of Ray end by themselves and a helper removes the directory.
    """

    def __init__(self, on_lost: OnLost) -> None:
        self._on_lost = on_lost
        self._is_closing = threading.Event()
        with ExitStack() as undo:
            self.directory = _make_directory()
            undo.callback(remove_runtime_dir, self.directory)
            undo.callback(remove_with_process(self.directory))
            self._undo = undo.pop_all()
        self._thread = threading.Thread(target=self._watch, name="watch-local-ray", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Disconnect from the cluster and end it. Nothing of it is left."""
        self._is_closing.set()
        self._thread.join()
        ray.shutdown()
        self._clean_up()

    def _watch(self) -> None:
        vital = _VitalProcesses()
        while not self._is_closing.wait(LOOK_SECONDS):
            if (reason := vital.why_lost()) is not None:
                self._end_process(reason)

    def _end_process(self, reason: str) -> None:
        """End this process, and what is left of the cluster before. No call of Ray's would return in time."""
        error = ClusterLost(f"the Ray cluster that was started on this host is lost: its {reason}")
        logger.debug("%s", error)
        try:
            self._on_lost(error)
            self._clean_up()
        finally:
            os._exit(1)

    def _clean_up(self) -> None:
        with self._undo:
            _end_processes(self.directory)


def _make_directory() -> Path:
    """Make a directory where Ray would make its own."""
    parent = os.environ.get("RAY_TMPDIR")
    if parent is not None:
        os.makedirs(parent, exist_ok=True)
    return make_runtime_dir(parent, max_length=MAX_DIR_LENGTH)


class _VitalProcesses:
    """The processes that Ray starts as children of this one, without which there is no cluster."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}

    def why_lost(self) -> str | None:
        """The one that has died, and how; None if none has."""
        if len(self._pids) < len(VITAL):
            self._pids |= {name: pid for pid, name in _children() if name in VITAL}
        for name, pid in self._pids.items():
            if (how := _how_ended(pid)) is not None:
                return f"{VITAL[name]} is gone: {how}"
        return None


def _children() -> Iterator[tuple[int, str]]:
    """Process id and name of every child of this process."""
    for thread in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread, or the child, has ended
            for pid in thread.read_text().split():
                yield int(pid), Path(f"/proc/{pid}/comm").read_text().strip()


def _how_ended(pid: int) -> str | None:
    """How a child of this process has ended, which is left to whoever waits for it; None if it has not."""
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "it has ended"
    if end is None:
        return None
    return explain_exit(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)


def _end_processes(directory: Path) -> None:
    """Kill the processes that write their output below `directory`: all of the cluster, whoever is their parent now.

    Workers and agents look for a dead raylet only now and then; until they end they hold memory and devices that the
    next cluster needs.
    """
    deadline = time.monotonic() + END_SECONDS
    while left := _writers_below(directory):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            raise EagleRayError(f"processes {left} of the local Ray cluster did not end within {END_SECONDS:.0f} s")
        time.sleep(0.02)


def _writers_below(directory: Path) -> list[int]:
    """Processes that have a file below `directory` open for writing: logs. Others may read the files there."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            is_written = link.lstat().st_mode & stat.S_IWUSR
            if is_written and os.readlink(link).startswith(f"{directory}/"):
                found.add(int(link.parts[2]))
    return sorted(found - {os.getpid()})
