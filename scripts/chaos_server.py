"""The server under test: started as a user starts it, with every one of its processes found by its label.

Owns the server's directory for temporary files, so that every file left in it is a leak.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

READY_SECONDS = 120.0
STOP_TIMEOUT_SECONDS = 120.0
POLL_SECONDS = 0.05

MARK = "EAGLERAY_CHAOS"
"""Environment variable of the server that marks every process descended from it, however it was started."""

HOST = "host "
"""Prefix of the label of a whole host."""

LABEL = re.compile(r"(?P<role>engine|client)-(?P<number>\d+)(?:\.(?P<incarnation>\d+))?(?P<worker>/tp\d+-pp\d+)?")
"""Pattern of the labels of `identity`: engine-0, engine-0.2, engine-0.2/tp1-pp0, client-1.3"""

RAYLET, CONTROL_STORE = "raylet", "control store"
"""Labels of Ray's own processes."""

FORK_SERVER = "fork-server"
"""Label of the process that forks engines and workers."""

TITLES = {"ray::EngineActor": "engine", "ray::ActorProcess": "worker", "ray::GraphActor": "worker"}
"""Titles that Ray gives to the processes of actors; showing labels instead needs setproctitle."""


class ChaosFailed(Exception):
    """Raised if the server did not behave so that the run can go on."""


@dataclass(frozen=True)
class Target:
    """Process or host of the instance that faults may hit."""

    pid: int
    """Process id; of a host, that of a process of the instance on it."""
    label: str

    @property
    def kind(self) -> str:
        """`engine`, `worker`, `API server`, `fork-server`, `host`, `raylet`, `control store`, or `driver` for all
        others."""
        if self.label.startswith(HOST):
            return "host"
        if self.label in (RAYLET, CONTROL_STORE, FORK_SERVER):
            return self.label
        if (match := LABEL.fullmatch(self.label)) is None:
            return TITLES.get(self.label, "driver")
        if match["worker"]:
            return "worker"
        return "engine" if match["role"] == "engine" else "API server"

    @property
    def place(self) -> str:
        """The label without the incarnation."""
        return LABEL.sub(lambda match: f"{match['role']}-{match['number']}{match['worker'] or ''}", self.label)

    @property
    def incarnation(self) -> int:
        match = LABEL.fullmatch(self.label)
        return int(match["incarnation"] or 0) if match else 0


def age(pid: int) -> float:
    """Return the seconds since the process started; 0 if it has exited."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else 0.0


class Server:
    """`eagleray serve` with `arguments`, which writes its output to the file `log`.

    `root`: a directory for this server alone. `enter`: a command that runs the server, as its only child, in another
    namespace. `temporary`: path of the server's temporary directory for this program if it is not below `root`; the
    additional variables `env` then set TMPDIR.
    """

    def __init__(
        self,
        arguments: list[str],
        root: Path,
        *,
        log: Path,
        enter: Sequence[str] = (),
        temporary: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.mark = secrets.token_hex(8)
        self.temporary = temporary or root / "tmp"
        self.temporary.mkdir()
        variables = {"TMPDIR": str(self.temporary), MARK: self.mark} | dict(env or {})
        self.tmpdir = variables["TMPDIR"]
        """Path of the temporary directory for the server itself."""
        self._log = log
        self._is_entered = bool(enter)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*enter, sys.executable, "-m", "eagleray.cli.main", "serve", *arguments, "--port", "0"],
                stdin=subprocess.DEVNULL,
                stdout=file,  # Ray reports on nodes there
                stderr=file,
                env=os.environ | variables,
            )
        self.url = ""

    @property
    def pid(self) -> int:
        """Process id of the supervisor in this machine's own namespace."""
        return next(iter(_children(self._process.pid)), 0) if self._is_entered else self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_serving(self) -> None:
        """Wait until the server serves. Raises `ChaosFailed` with the log if it does not."""
        deadline = time.monotonic() + READY_SECONDS
        while (match := re.search(r"serving .* at (http://\S+)/v1", self.log)) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ChaosFailed(f"the server did not start:\n{self.log}")
            time.sleep(POLL_SECONDS)
        self.url = match[1]

    def members(self) -> list[Target]:
        """Return the running processes of this host that the supervisor and its children have started."""
        found, queue = [], [self.pid]
        while queue:
            for pid in _children(queue.pop()):
                queue.append(pid)
                if (label := _label(pid)) is not None:
                    found.append(Target(pid, label))
        return found

    def engines(self) -> list[Target]:
        """Return the engines that /server_info lists; their process ids are not known."""
        with httpx.Client(base_url=self.url, timeout=10.0, trust_env=False) as http:
            entries = http.get("/server_info").json()["engines"]
        return [Target(0, f"engine-{entry['rank']}.{entry['incarnation']}") for entry in entries]

    def check(self) -> None:
        """Raises `ChaosFailed` if the supervisor has exited."""
        if self._process.poll() is not None:
            raise ChaosFailed(f"the supervisor exited with code {self._process.returncode}:\n{self.log}")

    def wait_until_all_engines_answer(self, *, num_engines: int, seconds: float) -> None:
        """Wait until every engine answers a request that names it. Raises `ChaosFailed` after `seconds`."""
        deadline = time.monotonic() + seconds
        with httpx.Client(base_url=self.url, timeout=seconds, trust_env=False) as http:
            for rank in range(num_engines):
                while not (reply := self._send_to_engine(http, rank)).startswith("200"):
                    self.check()
                    if time.monotonic() > deadline:
                        raise ChaosFailed(f"engine {rank} was not back {seconds:.0f} s after the last fault: {reply}")
                    time.sleep(POLL_SECONDS)

    def stop(self) -> int:
        """Send SIGTERM, wait and return the exit code. Raises `ChaosFailed` if the server does not exit."""
        if self._process.poll() is None:
            _signal(self.pid or self._process.pid, signal.SIGTERM)
        try:
            return self._process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise ChaosFailed(
                f"the server did not exit within {STOP_TIMEOUT_SECONDS:.0f} s of SIGTERM:\n{self.log}"
            ) from None

    def kill(self) -> None:
        """Kill every remaining process."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pid in self.remaining_processes():
            _signal(pid, signal.SIGKILL)

    def remaining_processes(self) -> list[int]:
        """Return the processes of this host that descend from the server, whoever is their parent now."""
        return list(processes_with(self.own_mark))

    @property
    def own_mark(self) -> str:
        """Entry in the environment of every process that descends from the server."""
        return f"{MARK}={self.mark}"

    @staticmethod
    def _send_to_engine(http: httpx.Client, rank: int) -> str:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1}}
        try:
            response = http.post("/inference/v1/generate", json=body, headers={"X-data-parallel-rank": str(rank)})
        except httpx.TransportError as error:
            return repr(error)
        return f"{response.status_code} {response.text[:300]}"


def processes_with(entry: str) -> dict[int, str]:
    """Return the command lines, with NUL between words, of this host's processes with `entry` in the environment."""
    mark = entry.encode()
    pids = [pid for pid in _all_pids() if mark in _read(pid, "environ").split(b"\0") and _is_running(pid)]
    return {pid: _read(pid, "cmdline").decode(errors="replace") for pid in pids}


def exit_on_sigterm() -> None:
    """Turn SIGTERM into `SystemExit`, so that servers and clusters of this program are stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def free_port() -> int:
    """Return a port that is free at present."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has just exited
        return []


def _label(pid: int) -> str | None:
    """Return the label that `process.spawn` puts last on a child's command line; None for other programs."""
    words = _read(pid, "cmdline").rstrip(b"\0").split(b"\0")
    is_child = any(b"eagleray.process.child" in word for word in words)
    return words[-1].decode() if is_child and _is_running(pid) else None


def _all_pids() -> Iterable[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_running(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    status = _read(pid, "stat")
    return bool(status) and status.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def _read(pid: int, name: str) -> bytes:
    """Read a file of /proc; empty if the process has exited or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
