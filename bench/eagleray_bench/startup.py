"""Startup times as users see them: from the start of a program with `LLM`, or of a server, to its first answer."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any, NamedTuple

import msgspec

from eagleray.errors import DeadlineExceeded, EagleRayError, UserError
from eagleray_bench.figures import Summary, summarize
from eagleray_bench.http_client import request_once

KINDS = ("program", "server")
STOP_TIMEOUT_SECONDS = 60.0
ANSWER_SECONDS = 120.0
PROGRAM = [sys.executable, "-m", "eagleray_bench.first_answer"]
SERVER = [sys.executable, "-m", "eagleray.cli.main", "serve"]


class StartTimes(NamedTuple):
    """Seconds since the process was started."""

    ready: float
    answered: float
    """Time of the first answer, to a request of one token."""


class StartupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Start times of one kind, in seconds."""

    kind: str
    ready_s: Summary
    answered_s: Summary


def measure_startup(
    options: Mapping[str, Any], *, kinds: Sequence[str], repeat: int, timeout: float
) -> Iterator[StartupFigures]:
    """Measure `repeat` starts of each kind, in turn. Raises as `start_program`, and `UserError` if `repeat` < 1."""
    if repeat < 1:
        raise UserError(f"--repeat must be at least 1, but it is {repeat}")
    starters = {"program": start_program, "server": start_server}
    starts: dict[str, list[StartTimes]] = {kind: [] for kind in kinds}
    for _ in range(repeat):
        for kind, of_kind in starts.items():
            of_kind.append(starters[kind](options, timeout=timeout))
    for kind, of_kind in starts.items():
        ready, answered = (
            summarize([start.ready for start in of_kind]),
            summarize([start.answered for start in of_kind]),
        )
        assert ready is not None and answered is not None
        yield StartupFigures(kind=kind, ready_s=ready, answered_s=answered)


def start_program(options: Mapping[str, Any], *, timeout: float) -> StartTimes:
    """Start a Python program that makes an `LLM` with these options and generates a token.

    Raises `EagleRayError` with its last line if it exits, and `DeadlineExceeded` if it takes longer than `timeout`.
    """
    began = time.perf_counter()
    with _started([*PROGRAM, json.dumps(dict(options))]) as process:
        ready, _ = process.wait_for(r"^ready$", timeout)
        answered, _ = process.wait_for(r"^answered$", ANSWER_SECONDS)
        process.wait_for_exit()
    return StartTimes(ready - began, answered - began)


def start_server(options: Mapping[str, Any], *, timeout: float) -> StartTimes:
    """Start `eagleray serve` with these options; it is ready when /ready says so. Raises as `start_program` does."""
    with tempfile.TemporaryDirectory(prefix="eagleray-bench-") as directory:
        file = Path(directory) / "options.yaml"
        file.write_text(json.dumps(dict(options)))  # JSON is YAML
        began = time.perf_counter()
        with _started([*SERVER, "--config", str(file), "--port", "0", "--log-level", "info"]) as process:
            _, serving = process.wait_for(r"serving .* at (http://\S+)/v1", timeout)
            url = serving[1]
            _request(url, "/ready")
            ready = time.perf_counter() - began
            _request(url, "/v1/completions", json.dumps({"prompt": [1, 2, 3, 4], "max_tokens": 1}).encode())
            answered = time.perf_counter() - began
    return StartTimes(ready, answered)


class _Process:
    """A process whose output lines are read as they come, with their times."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen
        self._lines: Queue[tuple[float, str] | None] = Queue()
        self._log: list[str] = []
        assert popen.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(popen.stdout,), daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str, seconds: float) -> tuple[float, re.Match[str]]:
        """Wait for the next line with `pattern` and return its time and the match."""
        deadline = time.perf_counter() + seconds
        while True:
            try:
                entry = self._lines.get(timeout=max(0.0, deadline - time.perf_counter()))
            except Empty:
                raise DeadlineExceeded(
                    f"the started process is not ready after {seconds:.0f} s: {self._last_line()}"
                ) from None
            if entry is None:
                raise EagleRayError(f"the started process exited before it was ready: {self._last_line()}")
            when, line = entry
            if match := re.search(pattern, line):
                return when, match

    def wait_for_exit(self) -> None:
        """Wait until the process exits by itself."""
        try:
            self._popen.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"the started process has not exited {STOP_TIMEOUT_SECONDS:.0f} s after its work"
            ) from None

    def stop(self) -> None:
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait(STOP_TIMEOUT_SECONDS)
        self._reader.join(STOP_TIMEOUT_SECONDS)

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._log.append(line)
                self._lines.put((time.perf_counter(), line))
        self._lines.put(None)

    def _last_line(self) -> str:
        return "".join(self._log[-1:]).strip() or "it printed nothing"


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[_Process]:
    process = _Process(
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    )
    try:
        yield process
    finally:
        process.stop()


def _request(url: str, path: str, body: bytes | None = None) -> None:
    """Send a GET, or a POST if there is a body. Raises `EagleRayError` unless the reply is a success."""
    reply = request_once(url + path, body=body, timeout=ANSWER_SECONDS)
    if reply.status != 200:
        raise EagleRayError(f"the server refused {path} ({reply.status}): {reply.body[:500]!r}")
