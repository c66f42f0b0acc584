"""Ray for a server whose engines are actors: a cluster that this program maintains, or the server's own.

Owns the nodes of the former, and finds the processes of both by an environment variable.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chaos_server import CONTROL_STORE, LABEL, RAYLET, TITLES, ChaosFailed, Target, free_port, processes_with

CPUS_PER_ENGINE = 4
NUM_WORKER_NODES = 2
OBJECT_STORE_BYTES = 100 * 2**20

MARK = "EAGLERAY_CHAOS_RAY"
"""Environment variable of each process of a cluster that this program has started."""

DOWN_SECONDS = 3.0
"""Time after which the operator thread restarts a node."""

START_SECONDS = 60.0
POLL_SECONDS = 0.2
LOG_CHARACTERS = 1000
"""Length of the end of a node's log that is shown if the node does not start."""

DAEMONS = {"/raylet/raylet": RAYLET, "/gcs/gcs_server": CONTROL_STORE}


def prepare(root: Path) -> None:
    """Set the environment so that Ray's processes of this program write to `root`."""
    (root / "ray").mkdir()
    os.environ |= {"RAY_TMPDIR": str(root / "ray"), "RAY_AUTH_MODE": "disabled", "TMPDIR": str(root / "tmp")}
    os.environ.pop("RAY_ADDRESS", None)


def members_with(mark: str) -> list[Target]:
    """Return the engines, workers, raylets and control stores among the processes with `mark` in their environment."""
    found = []
    for pid, line in processes_with(mark).items():
        program = line.partition("\0")[0]
        if label := next((label for name, label in DAEMONS.items() if program.endswith(name)), None):
            found.append(Target(pid, label))
        elif title := next((title for title in TITLES if line.startswith(title)), None):
            match = LABEL.search(line)
            found.append(Target(pid, match[0] if match else title))
    return found


class RayNode:
    """Node of a cluster, run by `ray start --block`: when one of its daemons exits, the whole node does."""

    def __init__(self, arguments: list[str], log: Path, env: dict[str, str]) -> None:
        self._words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
        self._log = log
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def has_joined(self) -> bool:
        """Whether the node has joined the cluster, some time after its raylet has started."""
        return "Ray runtime started" in self.log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def start(self) -> None:
        with self._log.open("ab") as file:
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=os.environ | self._env
            )

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)


class RayCluster:
    """A head without resources and two nodes for engines on this host, each restarted soon after its exit.

    A control store that exits loses its state: its successor is a new cluster at the same address, which the nodes join
    when they have noticed.

    Each node has its own directory. In a shared one, Ray chooses the names of a node's sockets by the files that it
    finds there, so two nodes that start at the same time may choose the same name. The second raylet then aborts, but
    its `ray start` does not exit for another half a minute.
    """

    def __init__(self, root: Path, *, num_engines: int) -> None:
        mark = secrets.token_hex(8)
        port = free_port()
        self.address = f"{_own_address()}:{port}"
        common = ["--object-store-memory", str(OBJECT_STORE_BYTES), "--min-worker-port", "0", "--max-worker-port", "0"]
        head = ["--head", "--port", str(port), "--num-cpus", "0", "--include-dashboard", "false"]
        cpus = str(CPUS_PER_ENGINE * -(-num_engines // NUM_WORKER_NODES))
        workers = [
            ["--address", self.address, "--num-cpus", cpus, "--temp-dir", str(root / f"ray-{number}")]
            for number in range(1, 1 + NUM_WORKER_NODES)
        ]
        self._marks = [f"{MARK}={mark}-{number}" for number in range(1 + NUM_WORKER_NODES)]
        self._nodes = [
            RayNode([*arguments, *common], root / f"ray-node-{number}.log", {MARK: f"{mark}-{number}"})
            for number, arguments in enumerate([head, *workers])
        ]
        self._is_closing = threading.Event()
        self._operator = threading.Thread(target=self._restart_nodes, daemon=True)

    def start(self) -> None:
        """Start all nodes and wait for them. Raises `ChaosFailed`."""
        head, *workers = self._nodes
        head.start()
        self._wait_for([head])
        for node in workers:
            node.start()
        self._operator.start()
        self._wait_for(workers)

    def _wait_for(self, nodes: list[RayNode]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while missing := [node for node in nodes if not node.has_joined]:
            if time.monotonic() > deadline:
                ends = "\n".join(node.log[-LOG_CHARACTERS:] for node in missing)
                count = len(missing)
                raise ChaosFailed(f"Ray has not started {count} of its nodes within {START_SECONDS:g} s:\n{ends}")
            time.sleep(POLL_SECONDS)

    def members(self) -> list[Target]:
        """Return the processes that may be killed: not the head's raylet, with which the control store would exit."""
        head, *workers = self._marks
        found = [member for member in members_with(head) if member.label != RAYLET]
        return found + [member for mark in workers for member in members_with(mark)]

    def left(self) -> list[str]:
        """Return the names of every actor that is not dead and every placement group that is not removed."""
        found = self._query()
        return [f"actor {name}" for name in found["actors"]] + [f"group {name}" for name in found["groups"]]

    def census(self) -> dict[str, float]:
        """Return the numbers of actors and of placement groups, and the megabytes in use in the object stores."""
        found = self._query()
        return {
            "Ray actors": len(found["actors"]),
            "Ray groups": len(found["groups"]),
            "Ray objects, MB": found["object_store_bytes"] / 2**20,
        }

    def _query(self) -> dict[str, Any]:
        """Query the cluster in another process, because a driver exits with the cluster that it is connected to."""
        words = [sys.executable, str(Path(__file__).with_name("chaos_ray_census.py")), self.address]
        run = subprocess.run(words, capture_output=True, text=True, timeout=START_SECONDS)
        if run.returncode != 0:
            raise ChaosFailed(f"the Ray cluster at {self.address} does not say what is in it:\n{run.stderr[-1000:]}")
        found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        return found

    def close(self) -> None:
        self._is_closing.set()
        if self._operator.is_alive():
            self._operator.join()
        for node in reversed(self._nodes):
            node.stop()
        for pid in [pid for mark in self._marks for pid in processes_with(mark)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def _restart_nodes(self) -> None:
        """Restart nodes that have exited, each `DOWN_SECONDS` after that was noticed."""
        down: dict[RayNode, float] = {}
        while not self._is_closing.wait(POLL_SECONDS):
            for node in self._nodes:
                if node.is_up:
                    down.pop(node, None)
                elif time.monotonic() > down.setdefault(node, time.monotonic()) + DOWN_SECONDS:
                    node.start()
                    del down[node]


@contextmanager
def cluster(root: Path, *, num_engines: int) -> Iterator[RayCluster]:
    """Start a cluster on this host that is stopped with the context."""
    prepare(root)
    ray = RayCluster(root, num_engines=num_engines)
    try:
        ray.start()
        yield ray
    finally:
        ray.close()


def _own_address() -> str:
    """Return the address that Ray gives a node of this host; a head cannot have the loopback address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        return str(ray.util.get_node_ip_address())
