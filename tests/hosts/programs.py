"""A command that a test runs on some host and whose output it reads, with a deadline on every wait."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

POLL_INTERVAL_SECONDS = 0.02
STOP_TIMEOUT_SECONDS = 10.0
TAIL_LINES = 40


def wait_until(condition: Callable[[], object], what: str, timeout: float) -> None:
    """Wait until `condition` holds. Raises `TimeoutError` after `timeout`."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        time.sleep(POLL_INTERVAL_SECONDS)


class Program:
    """A running command. Its stdout is read line by line; stderr goes to the file `log`, whose end is in errors."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # a Ctrl-C is for the tests, which kill the commands that they started
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def line(self, timeout: float) -> str:
        """Return the next line. Raises `TimeoutError` if none arrives in time, `EOFError` after the last."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no line within {timeout:g} s; {self.tail()}") from None
        if line is None:
            self._lines.put(None)
            raise EOFError(f"ended with {self._process.wait()}; {self.tail()}")
        return line

    def line_with(self, text: str, timeout: float) -> str:
        """Return the next line that contains `text`; earlier lines are dropped."""
        deadline = time.monotonic() + timeout
        while text not in (line := self.line(max(0.0, deadline - time.monotonic()))):
            pass
        return line

    def output(self, timeout: float) -> str:
        """Wait for the exit and return all output. Raises `RuntimeError` if the command failed."""
        deadline = time.monotonic() + timeout
        lines: list[str] = []
        with contextlib.suppress(EOFError):
            while True:
                lines.append(self.line(max(0.0, deadline - time.monotonic())))
        if status := self._process.wait():
            raise RuntimeError(f"{self._process.args} ended with {status}; {self.tail()}")
        return "\n".join(lines)

    def close(self) -> None:
        """Kill the command and its children, if they still run, and wait."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is None:
            for pid in (*self.children(), self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(STOP_TIMEOUT_SECONDS)
        if self._reader.is_alive():
            raise TimeoutError(
                f"{self._process.args} has exited, but another process still holds its stdout; {self.tail()}"
            )
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"the end of {self._log}:", *lines])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)
