"""A server to torment: started as a user does it, with every process of it found by its label.

Owns the directory that the server takes for its temporary files, so that what is left in it is a leak.
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
END_SECONDS = 120.0
POLL_SECONDS = 0.05

MARK = "EAGLERAY_CHAOS"
"""A variable of the server's environment, by which every process that comes of it is known, however it came about."""

HOST = "host "
"""Begins the label of a whole host."""

LABEL = re.compile(r"(?P<role>engine|client)-(?P<number>\d+)(?:\.(?P<incarnation>\d+))?(?P<worker>/tp\d+-pp\d+)?")
"""Of `identity`: engine-0, engine-0.2, engine-0.2/tp1-pp0, client-1.3"""

RAYLET, CONTROL_STORE = "raylet", "control store"
"""Labels of Ray's own processes."""

TITLES = {"ray::EngineHost": "engine", "ray::Host": "worker", "ray::GraphHost": "worker"}
"""What Ray calls the processes of actors; a label instead needs setproctitle."""


class ChaosFailed(Exception):
    """The server did not do what it must; nothing more can be learned from it."""


@dataclass(frozen=True)
class Member:
    """A process of the instance, or a host of it."""

    pid: int
    """Of a host: of what it has of the instance."""
    label: str

    @property
    def kind(self) -> str:
        """`engine`, `worker`, `API server`, `host`, `raylet`, `control store`, or `driver` for all others."""
        if self.label.startswith(HOST):
            return "host"
        if self.label in (RAYLET, CONTROL_STORE):
            return self.label
        if (match := LABEL.fullmatch(self.label)) is None:
            return TITLES.get(self.label, "driver")
        if match["worker"]:
            return "worker"
        return "engine" if match["role"] == "engine" else "API server"

    @property
    def slot(self) -> str:
        """The label without the incarnation."""
        return LABEL.sub(lambda match: f"{match['role']}-{match['number']}{match['worker'] or ''}", self.label)

    @property
    def incarnation(self) -> int:
        match = LABEL.fullmatch(self.label)
        return int(match["incarnation"] or 0) if match else 0


def age(pid: int) -> float:
    """Seconds since the process began; 0 if it has ended."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else 0.0


class Server:
    """`eagleray serve` with `arguments`. `root`: a directory of our own; `log`: the file that it writes to.

    `enter`: a command that runs it, as its only child, where it shall run. `temporary`: its directory for temporary
    files as this program reaches it, where that is not below `root`; then `env`, of more variables, has its own TMPDIR.
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
        """Its name where the server runs."""
        self._log = log
        self._is_entered = bool(enter)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*enter, sys.executable, "-m", "eagleray.cli.main", "serve", *arguments, "--port", "0"],
                stdin=subprocess.DEVNULL,
                stdout=file,  # Ray writes there what it has to say of nodes
                stderr=file,
                env=os.environ | variables,
            )
        self.url = ""

    @property
    def pid(self) -> int:
        """Of the supervisor, as this machine counts."""
        return next(iter(_children(self._process.pid)), 0) if self._is_entered else self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_serving(self) -> None:
        """Raises `ChaosFailed` with the log."""
        deadline = time.monotonic() + READY_SECONDS
        while (match := re.search(r"serving .* at (http://\S+)/v1", self.log)) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ChaosFailed(f"the server did not start:\n{self.log}")
            time.sleep(POLL_SECONDS)
        self.url = match[1]

    def members(self) -> list[Member]:
        """Processes of this host that the supervisor and its children have started and that have not ended."""
        found, queue = [], [self.pid]
        while queue:
            for pid in _children(queue.pop()):
                queue.append(pid)
                if (label := _label(pid)) is not None:
                    found.append(Member(pid, label))
        return found

    def engines(self) -> list[Member]:
        """Engines that are there, by what the server says of them; their processes are not known."""
        with httpx.Client(base_url=self.url, timeout=10.0, trust_env=False) as http:
            entries = http.get("/server_info").json()["engines"]
        return [Member(0, f"engine-{entry['rank']}.{entry['incarnation']}") for entry in entries]

    def check(self) -> None:
        """Raises `ChaosFailed` if the supervisor has ended."""
        if self._process.poll() is not None:
            raise ChaosFailed(f"the supervisor ended with exit code {self._process.returncode}:\n{self.log}")

    def wait_until_whole(self, *, num_engines: int, seconds: float) -> None:
        """Every engine answers a request that names it. Raises `ChaosFailed`."""
        deadline = time.monotonic() + seconds
        with httpx.Client(base_url=self.url, timeout=seconds, trust_env=False) as http:
            for rank in range(num_engines):
                while not (reply := self._ask(http, rank)).startswith("200"):
                    self.check()
                    if time.monotonic() > deadline:
                        raise ChaosFailed(f"engine {rank} was not back {seconds:.0f} s after the last blow: {reply}")
                    time.sleep(POLL_SECONDS)

    def stop(self) -> int:
        """SIGTERM, and wait: the exit code. Raises `ChaosFailed` if it does not end."""
        if self._process.poll() is None:
            _signal(self.pid or self._process.pid, signal.SIGTERM)
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise ChaosFailed(f"the server did not end within {END_SECONDS:.0f} s of SIGTERM:\n{self.log}") from None

    def kill(self) -> None:
        """Whatever is left, at once."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pid in self.survivors():
            _signal(pid, signal.SIGKILL)

    def survivors(self) -> list[int]:
        """Processes of this host that came of the server, whoever is their parent now."""
        return list(processes_with(self.own_mark))

    @property
    def own_mark(self) -> str:
        """The entry of the environment that all processes have that came of the server."""
        return f"{MARK}={self.mark}"

    @staticmethod
    def _ask(http: httpx.Client, rank: int) -> str:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1}}
        try:
            response = http.post("/inference/v1/generate", json=body, headers={"X-data-parallel-rank": str(rank)})
        except httpx.TransportError as error:
            return repr(error)
        return f"{response.status_code} {response.text[:300]}"


def processes_with(entry: str) -> dict[int, str]:
    """The processes of this host that run with `entry` in their environment, and their command lines, in which NUL
    separates the words."""
    mark = entry.encode()
    pids = [pid for pid in _all_pids() if mark in _read(pid, "environ").split(b"\0") and _is_running(pid)]
    return {pid: _read(pid, "cmdline").decode(errors="replace") for pid in pids}


def end_properly_when_told() -> None:
    """Turn SIGTERM into an exception, so that servers and clusters of this program end with it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def free_port() -> int:
    """A port that nobody listens on at present."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _children(pid: int) -> list[int]:
    """A child belongs to the thread that has forked it."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has just ended
        return []


def _label(pid: int) -> str | None:
    """What `process.spawn` says of a child, as the last word of its command line; None for other programs."""
    words = _read(pid, "cmdline").rstrip(b"\0").split(b"\0")
    is_child = any(b"eagleray.process.child" in word for word in words)
    return words[-1].decode() if is_child and _is_running(pid) else None


def _all_pids() -> Iterable[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_running(pid: int) -> bool:
    """A zombie that nobody has reaped yet has ended."""
    status = _read(pid, "stat")
    return bool(status) and status.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def _read(pid: int, name: str) -> bytes:
    """Of /proc; empty if the process has ended or is none of ours."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
