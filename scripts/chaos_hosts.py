"""Hosts for the engines of a server on Ray, which faults kill and cut off.

Each is a simulated host of `tests/hosts`; the server and its clients run on the head, which no fault hits.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos_faults import CUT, KILL, SHORT_CUT
from chaos_server import HOST, LABEL, TITLES, Target

sys.path.append(str(Path(__file__).parents[1] / "tests" / "hosts"))

from programs import wait_until
from ray_hosts import Driver, RayCluster
from simulated_hosts import Host, host_network
from simulated_hosts import why_impossible as why_impossible

RESOURCE = "engine"
"""Ray resource of which every host but the head has one."""

SHORT_SHARE = 0.3
"""Duration of a short cut of a link, as a share of the time after which silence is noticed."""

STOP_TIMEOUT_SECONDS = 75.0
"""Time within which a process that is cut off exits: soon after it has noticed the silence, or, if it was never called,
when Ray's node gives up, which takes a minute."""

LATE_SECONDS = 1.0
"""Wait for messages that were on their way when a link was cut and arrive when it is healed."""

TEMPORARY = "/tmp/eagleray-chaos"
"""Temporary directory of the server, on the head alone: shared Unix sockets could not be cut."""

RAYS_MEMORY = ("plasma", "ray", "sem.")


class Cluster:
    """Cluster of simulated hosts, made by `cluster`. `missed_after`: seconds after which silence is noticed."""

    def __init__(self, ray: RayCluster, driver: Driver, num_hosts: int, *, missed_after: float) -> None:
        self.address = ray.address
        self.enter = ray.head.enter
        self.temporary = ray.head.path(TEMPORARY)
        self.env = {**ray.token, "TMPDIR": TEMPORARY}
        self.trouble: list[str] = []
        self._ray = ray
        self._driver = driver
        self._missed_after = missed_after
        self._hosts = ray.add(*([{RESOURCE: 1}] * num_hosts))

    def arguments(self) -> list[str]:
        """Return the options of `serve` that place each engine on a host of its own."""
        resources = f'{{"{RESOURCE}": 1}}'
        placement = ["--ray-engine-placement", "strict-spread", "--ray-worker-resources", resources]
        return ["--ray-address", self.address, "--executor", "in-process", *placement]

    def hosts(self) -> list[Target]:
        """Return the hosts with an engine."""
        there = [(host, _processes(host)) for host in self._hosts]
        return [Target(processes[0].pid, f"{HOST}{host.name}") for host, processes in there if processes]

    def inject(self, host: Target, how: str) -> None:
        """Kill `host` or cut its link. A host that is killed or cut off for long is replaced: Ray has given it up."""
        (target,) = (each for each in self._hosts if host.label == f"{HOST}{each.name}")
        if how == SHORT_CUT:
            self._ray.network.cut(target)
            time.sleep(SHORT_SHARE * self._missed_after)
            self._ray.network.heal(target)
            return
        assert how in (KILL, CUT), how
        if how == CUT:
            self._cut_off(target)
        target.kill()
        self._hosts.remove(target)
        self._hosts += self._ray.add({RESOURCE: 1})

    def _cut_off(self, host: Host) -> None:
        self._ray.network.cut(host)
        time.sleep(self._missed_after)
        try:
            wait_until(
                lambda: not _processes(host), f"the engine on {host.name}, cut off, ends itself", STOP_TIMEOUT_SECONDS
            )
        except TimeoutError as error:
            self.trouble.append(str(error))
        self._ray.network.heal(host)
        time.sleep(LATE_SECONDS)

    def members(self) -> list[Target]:
        """Return the processes of engines and workers on all hosts."""
        return [member for host in self._hosts for member in _processes(host)]

    def labelled(self) -> list[Target]:
        """Return the running actors of engines and workers by their labels; their process ids are not known."""
        return [Target(0, match[0]) for name in self._look()["actors"] if (match := LABEL.search(name))]

    def left(self) -> list[str]:
        """Return everything left of the server except its own processes on the head."""
        found = self._look()
        actors = [f"actor {name}" for name in found["actors"]] + [f"group {name}" for name in found["groups"]]
        return actors + [
            f"{what} on {host.name}"
            for host in self._hosts
            for what in [*(f"process {member.pid}" for member in _processes(host)), *_segments(host)]
        ]

    def _look(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = self._driver.do("cluster", address=self.address)
        return found


@contextmanager
def cluster(root: Path, *, num_hosts: int, missed_after: float) -> Iterator[Cluster]:
    """Start a head and `num_hosts` hosts that see `root`. This process joins the head's network for the time."""
    with host_network(root) as network:
        ray = RayCluster(network)
        driver = ray.driver()
        with _in_network_of(ray.head):
            yield Cluster(ray, driver, num_hosts, missed_after=missed_after)


@contextmanager
def _in_network_of(host: Host) -> Iterator[None]:
    """Move this thread, and the threads that it starts, into the network of `host`."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{host.pid}/ns/net", os.O_RDONLY)
    try:
        _set_namespace(there)
        yield
    finally:
        _set_namespace(own)
        os.close(there)
        os.close(own)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(descriptor, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _processes(host: Host) -> list[Target]:
    found = []
    for pid, line in host.processes().items():
        if match := LABEL.search(line):
            found.append(Target(pid, match[0]))
        elif title := next((title for title in TITLES if line.startswith(title)), None):
            found.append(Target(pid, title))
    return found


def _segments(host: Host) -> list[str]:
    names = (path.name for path in host.path("/dev/shm").iterdir())
    return [f"shared memory {name}" for name in names if not name.startswith(RAYS_MEMORY)]
