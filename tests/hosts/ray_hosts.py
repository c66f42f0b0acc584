"""A Ray cluster of simulated hosts, and programs on its head that use engines."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Mapping
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
    """Each host has a node with 2 CPUs, the head as well. The cluster wants a token."""

    def __init__(self, network: HostNetwork, *, head: Mapping[str, float] | None = None) -> None:
        """`head`: custom resources of its node."""
        self.network = network
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.head = network.add()
        _wait_for_node(self._node(self.head, head or {}))

    @property
    def address(self) -> str:
        return f"{self.head.ip}:{PORT}"

    def add(self, *resources: Mapping[str, float], env: Mapping[str, str] | None = None) -> list[Host]:
        """A host, which is a node, for each of these custom resources. `env`: of the nodes."""
        hosts = [self.network.add() for _ in resources]
        for program in [self._node(host, each, env) for host, each in zip(hosts, resources, strict=True)]:
            _wait_for_node(program)
        return hosts

    def driver(self, *, on: Host | None = None, env: Mapping[str, str] | None = None) -> Driver:
        """A program on the head, or on another host. `env` instead of the cluster's token."""
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
        return host.start([*ray, *limits, "--disable-usage-stats"], env={**self.token, **quiet, **(env or {})})


class RayHosts(RayCluster):
    """Custom resources name who shall take part: "duo" is on the first two hosts, "trio" on the first three, "spare-i"
    on the first and on the i-th that was added later.
    """

    def __init__(self, network: HostNetwork) -> None:
        spares = {f"spare-{index}": 1 for index in range(SPARES)}
        super().__init__(network, head={"duo": 2, "trio": 1, **spares})
        self.hosts = [self.head, *self.add({"duo": 2, "trio": 1}, {"trio": 1})]
        self._num_spares = 0

    def spare(self, *, env: Mapping[str, str] | None = None) -> tuple[Host, str]:
        """One more host, to do harm to; and the resource that it shares with the head. `env`: of its node."""
        resource = f"spare-{self._num_spares}"
        self._num_spares += 1
        (host,) = self.add({resource: 1}, env=env)
        return host, resource


def workers(host: Host) -> list[int]:
    """The Ray workers on `host` that are something."""
    return [pid for pid, line in host.processes().items() if _is_worker(line)]


def _is_worker(command_line: str) -> bool:
    """By the title that Ray, or the worker itself, gives to the process."""
    return command_line.startswith(("ray::", "eagleray ")) and not command_line.startswith(RAYS_OWN)


class Failure(Exception):
    """What the driver's command raised."""

    def __init__(self, kind: str, message: str, when: float) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.when = when
        """As this machine's monotonic clock says, which all hosts share."""


class Driver:
    """See `engine_driver`, which has the commands."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.wait_for("ready")

    @property
    def pid(self) -> int:
        """As this machine counts."""
        return self._program.children()[0]

    def do(self, command: str, *, timeout: float = DRIVER_SECONDS, **arguments: Any) -> Any:
        """Run it and wait for its result. Raises `Failure`."""
        self.begin(command, **arguments)
        return self.result(timeout)

    def begin(self, command: str, **arguments: Any) -> None:
        self._program.write(json.dumps({"do": command, **arguments}, default=str))

    def result(self, timeout: float = DRIVER_SECONDS) -> Any:
        """Of what was begun. Events before it are dropped."""
        deadline = time.monotonic() + timeout
        while True:
            message = json.loads(self._program.line(max(0.0, deadline - time.monotonic())))
            if "error" in message:
                raise Failure(message["error"], message["message"], message["time"])
            if "result" in message:
                return message["result"]

    def wait_for(self, event: str, timeout: float = DRIVER_SECONDS) -> float:
        """Of what was begun; when it happened."""
        message = json.loads(self._program.line(timeout))
        if "error" in message:
            raise Failure(message["error"], message["message"], message["time"])
        assert message["event"] == event
        return float(message["time"])

    def close(self) -> None:
        """Kill it: what its engines leave then is for them to end."""
        self._program.close()


def _wait_for_node(program: Program) -> None:
    program.line_with("Ray runtime started", NODE_SECONDS)
