"""A Ray cluster of simulated hosts, and programs on its head that use engines."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from programs import Program
from simulated_hosts import Host, HostNetwork

PORT = 6379
SPARES = 24
NODE_SECONDS = 60.0
RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::DAGDriverProxyActor")
DRIVER_SECONDS = 60.0


class RayCluster:
    """A cluster with a node of 2 CPUs on each host, including the head. It demands a token."""

    options: Sequence[str] = ()
    """Further options of `ray start` on every host."""

    def __init__(self, network: HostNetwork, *, head: Mapping[str, float] | None = None) -> None:
        """`head`: custom resources of the head's node."""
        self.network = network
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.head = network.add()
        _wait_for_node(self._node(self.head, head or {}))

    @property
    def address(self) -> str:
        return f"{self.head.ip}:{PORT}"

    def add(self, *resources: Mapping[str, float], env: Mapping[str, str] | None = None) -> list[Host]:
        """Add a host with a node for each of these custom resources. `env`: environment of the nodes."""
        hosts = [self.network.add() for _ in resources]
        for program in [self._node(host, each, env) for host, each in zip(hosts, resources, strict=True)]:
            _wait_for_node(program)
        return hosts

    def driver(self, *, on: Host | None = None, env: Mapping[str, str] | None = None) -> Driver:
        """Start a program on the head, or on another host, with `env` or else the cluster's token."""
        program = (on or self.head).start(
            [sys.executable, str(Path(__file__).with_name("engine_driver.py"))],
            env=self.token if env is None else env,
        )
        return Driver(program)

    def _node(self, host: Host, resources: Mapping[str, float], env: Mapping[str, str] | None = None) -> Program:
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if host is self.head else []
        where = where or [f"--address={self.address}"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--block", f"--node-ip-address={host.ip}"]
        limits = ["--num-cpus=2", "--object-store-memory=80000000", f"--resources={json.dumps(dict(resources))}"]
        quiet = {"RAY_USAGE_STATS_ENABLED": "0"}
        return host.start(
            [*ray, *limits, "--disable-usage-stats", *self.options], env={**self.token, **quiet, **(env or {})}
        )


class RayHosts(RayCluster):
    """Hosts with custom resources that select participants: "duo" is on the first two hosts, "trio" on the first three,
    "spare-i" on the first and on the i-th that was added later.
    """

    def __init__(self, network: HostNetwork) -> None:
        spares = {f"spare-{index}": 1 for index in range(SPARES)}
        super().__init__(network, head={"duo": 2, "trio": 1, **spares})
        self.hosts = [self.head, *self.add({"duo": 2, "trio": 1}, {"trio": 1})]
        self._num_spares = 0

    def spare(self, *, env: Mapping[str, str] | None = None) -> tuple[Host, str]:
        """Add a host that a test may harm; return it and the resource that it shares with the head.

        `env`: environment of its node.
        """
        resource = f"spare-{self._num_spares}"
        self._num_spares += 1
        (host,) = self.add({resource: 1}, env=env)
        return host, resource


def workers(host: Host) -> list[int]:
    """Return the Ray workers on `host` that run an actor or a task."""
    return [pid for pid, line in host.processes().items() if _is_worker(line)]


def _is_worker(command_line: str) -> bool:
    """Whether the title, which Ray or the worker itself gives to the process, is that of an actor or task."""
    return command_line.startswith(("ray::", "eagleray ")) and not command_line.startswith(RAYS_OWN)


class Failure(Exception):
    """An exception that the driver's command raised."""

    def __init__(self, kind: str, message: str, when: float) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.when = when
        """Time by this machine's monotonic clock, which all hosts share."""


class Driver:
    """Sends commands to an `engine_driver` and receives its results."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.wait_for("ready")

    @property
    def pid(self) -> int:
        """Process id in this machine's namespace."""
        return self._program.children()[0]

    def do(self, command: str, *, timeout: float = DRIVER_SECONDS, **arguments: Any) -> Any:
        """Run a command and wait for its result. Raises `Failure`."""
        self.begin(command, **arguments)
        return self.result(timeout)

    def begin(self, command: str, **arguments: Any) -> None:
        self._program.write(json.dumps({"do": command, **arguments}, default=str))

    def result(self, timeout: float = DRIVER_SECONDS) -> Any:
        """Wait for the result of the command that was begun; earlier events are dropped."""
        deadline = time.monotonic() + timeout
        while True:
            message = json.loads(self._program.line(max(0.0, deadline - time.monotonic())))
            if "error" in message:
                raise Failure(message["error"], message["message"], message["time"])
            if "result" in message:
                return message["result"]

    def wait_for(self, event: str, timeout: float = DRIVER_SECONDS) -> float:
        """Wait for an event of the command that was begun; return its time."""
        message = json.loads(self._program.line(timeout))
        if "error" in message:
            raise Failure(message["error"], message["message"], message["time"])
        assert message["event"] == event
        return float(message["time"])

    def close(self) -> None:
        """Kill the program. Its engines must clean up by themselves."""
        self._program.close()


def _wait_for_node(program: Program) -> None:
    program.line_with("Ray runtime started", NODE_SECONDS)
