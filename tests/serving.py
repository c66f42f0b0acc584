"""`eagleray serve` as a process of its own, started as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from forked_programs import ForkedProgram, fork_server_of_tests

from eagleray.process.fork_server import ForksChildren, NoFork

READY_SECONDS = 60.0
END_SECONDS = 30.0


COMMAND = (sys.executable, "-m", "eagleray.cli.main")


def run_program(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run the command line of eagleray, as a fork if possible. Its standard input is empty."""
    if (server := fork_server_of_tests()) is not None:
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr, contextlib.suppress(NoFork):
            program = ForkedProgram(arguments, server, stdout=stdout.fileno(), stderr=stderr.fileno())
            try:
                code = program.wait(timeout)
            finally:
                program.send_signal(signal.SIGKILL)
            written = [
                os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (stdout, stderr)
            ]
            return subprocess.CompletedProcess(arguments, code, *written)
    return subprocess.run([*COMMAND, *arguments], input="", capture_output=True, text=True, timeout=timeout)


class ServerProcess:
    """A running server. `url` ends in /v1; `log` is its standard error so far."""

    def __init__(self, *arguments: str, is_fresh: bool = False) -> None:
        """`is_fresh`: the server and its engines are no forks of a process of the tests."""
        # One thread: these models are tiny, and a machine that is busy makes threads wait for each other.
        command = ("serve", *arguments, "--port", "0", "--num-threads", "1")
        reader, writer = os.pipe()
        self._lines = os.fdopen(reader)
        self.process = _start(command, writer, None if is_fresh else fork_server_of_tests())
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_for(r"serving .*(https?://\S+/v1)", READY_SECONDS)[1]

    def wait_for(self, pattern: str, seconds: float) -> re.Match[str]:
        """Return the first match of `pattern` in the log."""
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, self.log)) is None:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            assert not ended, f"the server ended ({self.process.returncode}):\n{self.log}"
            assert time.monotonic() < deadline, f"no {pattern!r} within {seconds} s:\n{self.log}"
            time.sleep(0.02)
        return match

    @property
    def children(self) -> list[int]:
        """Return the process ids of the engines and the API servers."""
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def child(self, name: str) -> int:
        """Return the process id of the child whose log label is `name` (needs --log-level debug)."""
        return int(self.wait_for(rf"\b{re.escape(name)} is process (\d+)", 5.0)[1])

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Stop the server with a signal and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
        return code

    def _read(self) -> None:
        with self._lines as lines:
            for line in lines:
                self.log += line


def _start(
    arguments: Sequence[str], stderr: int, server: ForksChildren | None
) -> subprocess.Popen[bytes] | ForkedProgram:
    """Start the command line of eagleray, and close `stderr` here."""
    try:
        if server is not None:
            with contextlib.suppress(NoFork):
                return ForkedProgram(arguments, server, stdout=None, stderr=stderr)
        return subprocess.Popen([*COMMAND, *arguments], stderr=stderr)
    finally:
        os.close(stderr)


@contextlib.contextmanager
def serve(*arguments: str, is_fresh: bool = False) -> Iterator[ServerProcess]:
    server = ServerProcess(*arguments, is_fresh=is_fresh)
    try:
        yield server
    finally:
        server.end()


def is_running(pid: int) -> bool:
    """Whether the process runs. A zombie that was not reaped yet does not."""
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"processes {left} are still running"
        time.sleep(0.05)
