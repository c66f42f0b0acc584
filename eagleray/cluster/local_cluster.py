"""Ray cluster of one node that this process starts: its directory, its shutdown, and a watch over its processes.

Owned by the `Connection` to it. The watch is a thread: when the raylet or the control store has died it exits this
process, because nothing helps a driver then. Ray itself lets a driver without a raylet run on, and ends one without a
control store a minute later without any message.
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
from eagleray.cluster.timeouts import LOCAL_CLUSTER_STOP_SECONDS, WAIT_SECONDS
from eagleray.errors import ClusterLost, EagleRayError
from eagleray.log import get_logger
from eagleray.process.spawn import explain_exit
from eagleray.transport.runtime_dir import LOCKED_NAME, make_runtime_dir, remove_runtime_dir

logger = get_logger(__name__)

OnLost = Callable[[ClusterLost], None]
"""Callback that gets the cause, from a thread, just before this process exits because of it."""

MAX_DIR_LENGTH = 45
"""Ray's longest socket path has 62 bytes after its directory, of the 107 that a Unix socket's path may have."""

VITAL = {"raylet": "raylet", "gcs_server": "control store"}
"""Processes without which the cluster is lost: name of the process, name in messages."""


class LocalCluster:
    """Created before `ray.init`, which must use `directory`. The owner closes it.

    The directory holds the logs and sockets of the cluster, and is removed with it; if this process is killed, the
    processes of Ray exit by themselves and a helper removes the directory.
    """

    def __init__(self, on_lost: OnLost) -> None:
        self._on_lost = on_lost
        self._is_closing = threading.Event()
        with ExitStack() as undo:
            self.directory = _make_directory()
            undo.callback(remove_runtime_dir, self.directory)
            undo.callback(remove_with_process(self.directory))
            self._exit_stack = undo.pop_all()
        self._thread = threading.Thread(target=self._watch, name="watch-local-ray", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Disconnect from the cluster and stop it. No process and no file of it is left."""
        self._is_closing.set()
        self._thread.join()
        ray.shutdown()
        self._clean_up()

    def _watch(self) -> None:
        pids: dict[str, int] = {}
        while not self._is_closing.wait(WAIT_SECONDS):
            if len(pids) < len(VITAL):  # Ray starts them as children of this process
                pids |= {name: pid for pid, name in _list_children() if name in VITAL}
            for name, pid in pids.items():
                if (how := _describe_exit(pid)) is not None:
                    self._exit(f"{VITAL[name]} is gone: {how}")

    def _exit(self, reason: str) -> None:
        """Kill the rest of the cluster, then exit this process. No call of Ray's would return in time."""
        error = ClusterLost(f"the Ray cluster that was started on this host is lost: its {reason}")
        logger.debug("%s", error)
        try:
            self._on_lost(error)
            self._clean_up()
        finally:
            os._exit(1)

    def _clean_up(self) -> None:
        with self._exit_stack:
            _kill_processes(self.directory)


def list_running_clusters() -> list[str]:
    """Return the addresses of the Ray clusters whose raylets this user runs on this host, except clusters that eagleray
    has started itself."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has exited
            program, *words = file.read_text(errors="replace").split("\0")
            options = dict(word.partition("=")[::2] for word in words)
            is_mine = Path(program).name == "raylet" and file.stat().st_uid == os.getuid()
            if is_mine and not LOCKED_NAME.search(options.get("--session_dir", "")):
                found.add(options.get("--gcs-address", ""))
    return sorted(found - {""})


def _make_directory() -> Path:
    """Make a directory where Ray would make its own."""
    parent = os.environ.get("RAY_TMPDIR")
    if parent is not None:
        os.makedirs(parent, exist_ok=True)
    return make_runtime_dir(parent, max_length=MAX_DIR_LENGTH)


def _list_children() -> Iterator[tuple[int, str]]:
    """Yield the process id and name of every child of this process."""
    for thread in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread, or the child, has exited
            for pid in thread.read_text().split():
                yield int(pid), Path(f"/proc/{pid}/comm").read_text().strip()


def _describe_exit(pid: int) -> str | None:
    """Return how a child of this process has exited, None if it runs. The exit status stays for its `wait`."""
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "it has ended"
    if end is None:
        return None
    return explain_exit(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)


def _kill_processes(directory: Path) -> None:
    """Kill the processes that write their output below `directory`: all of the cluster, whatever their parent is now.

    Workers and agents check only now and then for a dead raylet; until they exit they hold memory and devices that the
    next cluster needs.
    """
    deadline = time.monotonic() + LOCAL_CLUSTER_STOP_SECONDS
    while left := _processes_writing_below(directory):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            raise EagleRayError(
                f"processes {left} of the local Ray cluster did not end within {LOCAL_CLUSTER_STOP_SECONDS:.0f} s"
            )
        time.sleep(0.02)


def _processes_writing_below(directory: Path) -> list[int]:
    """Return the processes that have a file (a log) below `directory` open for writing. Others may read them."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            is_written = link.lstat().st_mode & stat.S_IWUSR
            if is_written and os.readlink(link).startswith(f"{directory}/"):
                found.add(int(link.parts[2]))
    return sorted(found - {os.getpid()})
