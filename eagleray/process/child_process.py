"""A child of this process, whichever way it was started."""

from __future__ import annotations

import os
import signal
import threading
from typing import Protocol


class ChildProcess(Protocol):
    """A child process that only its owner reaps. `subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """Process id of the child."""

    def kill(self) -> None:
        """Send SIGKILL. Harmless after the exit."""

    def wait(self) -> int | None:
        """Wait for the exit, reap the process, and return its exit code or the negative number of the signal that
        killed it; None if the system does not tell."""


class ForkedProcess:
    """A child that this process has not started by `subprocess`. `wait` is called by one thread alone."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._is_reaped = False

    def kill(self) -> None:
        """See `ChildProcess`."""
        with self._lock:
            if not self._is_reaped:  # another process may have the number afterwards
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int | None:
        """See `ChildProcess`."""
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                self._is_reaped = True
                _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:  # the program that this process belongs to has reaped it, or ignores SIGCHLD
            self._is_reaped = True
            return None
        return os.waitstatus_to_exitcode(status)
