"""From the start of a process to its first answer, the way a user starts it: a program with `LLM`, and the server."""

from __future__ import annotations

import contextlib
import http.client
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
from urllib.parse import urlsplit

import msgspec

from eagleray.errors import DeadlineExceeded, EagleRayError, UserError
from eagleray_bench.figures import Summary, summary

__all__ = ["KINDS", "Start", "StartupFigures", "measure_startup", "start_program", "start_server"]

KINDS = ("program", "server")
END_SECONDS = 60.0
ANSWER_SECONDS = 120.0
PROGRAM = [sys.executable, "-m", "eagleray_bench.first_answer"]
SERVER = [sys.executable, "-m", "eagleray.cli.main", "serve"]


class Start(NamedTuple):
    """Seconds since the process was started."""

    ready: float
    answered: float
    """When the first request, of one token, had its answer."""


class StartupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one kind, in seconds."""

    kind: str
    ready_s: Summary
    answered_s: Summary


def measure_startup(
    options: Mapping[str, Any], *, kinds: Sequence[str], repeat: int, timeout: float
) -> Iterator[StartupFigures]:
    """`repeat` starts of each kind, in turn. Raises as `start_program` does, and `UserError` for `repeat` below 1."""
    if repeat < 1:
        raise UserError(f"--repeat must be at least 1, but it is {repeat}")
    starters = {"program": start_program, "server": start_server}
    starts: dict[str, list[Start]] = {kind: [] for kind in kinds}
    for _ in range(repeat):
        for kind, of_kind in starts.items():
            of_kind.append(starters[kind](options, timeout=timeout))
    for kind, of_kind in starts.items():
        ready, answered = summary([start.ready for start in of_kind]), summary([start.answered for start in of_kind])
        assert ready is not None and answered is not None
        yield StartupFigures(kind=kind, ready_s=ready, answered_s=answered)


def start_program(options: Mapping[str, Any], *, timeout: float) -> Start:
    """A Python program that makes an `LLM` with these options and asks it for a token.

    Raises `EagleRayError` with what it said last if it ends, `DeadlineExceeded` if it takes longer than `timeout`.
    """
    began = time.perf_counter()
    with _started([*PROGRAM, json.dumps(dict(options))]) as process:
        ready, _ = process.wait_for(r"^ready$", timeout)
        answered, _ = process.wait_for(r"^answered$", ANSWER_SECONDS)
        process.wait_until_ended()
    return Start(ready - began, answered - began)


def start_server(options: Mapping[str, Any], *, timeout: float) -> Start:
    """`eagleray serve` with these options. Ready: /ready says so. Raises as `start_program` does."""
    with tempfile.TemporaryDirectory(prefix="eagleray-bench-") as directory:
        file = Path(directory) / "options.yaml"
        file.write_text(json.dumps(dict(options)))  # JSON is YAML
        began = time.perf_counter()
        with _started([*SERVER, "--config", str(file), "--port", "0", "--log-level", "info"]) as process:
            _, serving = process.wait_for(r"serving .* at (http://\S+)/v1", timeout)
            url = serving[1]
            _ask(url, "GET", "/ready", None)
            ready = time.perf_counter() - began
            _ask(url, "POST", "/v1/completions", {"prompt": [1, 2, 3, 4], "max_tokens": 1})
            answered = time.perf_counter() - began
    return Start(ready, answered)


class _Process:
    """A process whose lines, of both its outputs, are read as they come."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen
        self._lines: Queue[tuple[float, str] | None] = Queue()
        self._log: list[str] = []
        assert popen.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(popen.stdout,), daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str, seconds: float) -> tuple[float, re.Match[str]]:
        """When the next line with `pattern` came, and the match."""
        deadline = time.perf_counter() + seconds
        while True:
            try:
                entry = self._lines.get(timeout=max(0.0, deadline - time.perf_counter()))
            except Empty:
                raise DeadlineExceeded(f"what was started is not ready after {seconds:.0f} s: {self._said()}") from None
            if entry is None:
                raise EagleRayError(f"what was started ended before it was ready: {self._said()}")
            when, line = entry
            if match := re.search(pattern, line):
                return when, match

    def wait_until_ended(self) -> None:
        """By itself."""
        try:
            self._popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"what was started has not ended {END_SECONDS:.0f} s after its work") from None

    def end(self) -> None:
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait(END_SECONDS)
        self._reader.join(END_SECONDS)

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._log.append(line)
                self._lines.put((time.perf_counter(), line))
        self._lines.put(None)

    def _said(self) -> str:
        return "".join(self._log[-1:]).strip() or "it said nothing"


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[_Process]:
    process = _Process(
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    )
    try:
        yield process
    finally:
        process.end()


def _ask(url: str, method: str, path: str, body: Any) -> None:
    """Raises `EagleRayError` unless the answer is a success."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_SECONDS)
    with contextlib.closing(connection):
        connection.request(
            method, path, json.dumps(body) if body is not None else None, {"content-type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise EagleRayError(f"the server refused {path} ({response.status}): {response.read(500)!r}")
        response.read()
