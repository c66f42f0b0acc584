"""docs/multi_node.md: engines on hosts between which only the ports are open that the page lists."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from agreement import answers, assert_agree
from ray_hosts import Driver, RayCluster
from simulated_hosts import Host, HostNetwork

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft, of nftables, to close ports"),
]

PAGE = (Path(__file__).parents[2] / "docs" / "multi_node.md").read_text("utf-8")
OPTIONS = re.findall(r"--[a-z-]*port[a-z-]* \d+", PAGE)
"""Options of `ray start` that the page gives."""
FREE_PORTS = re.search(r'ip_local_port_range="(\d+ \d+)"', PAGE)[1]
OPEN_PORTS = re.search(r"tcp dport \{ ([\d, -]+) \}", PAGE)[1]
CLOSED_PORT = 5000
START_SECONDS = 180.0
"""Deadline for the start of engines, before which every host compiles the kernels."""
SEAT = {"seat": 1.0}
ATTEMPT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1)
except TimeoutError:
    print("dropped")
except OSError as error:
    print(error.strerror)
"""


class GuardedCluster(RayCluster):
    """A cluster whose hosts refuse connections to every port that the page does not open."""

    options = tuple(word for option in OPTIONS if not option.startswith("--port ") for word in option.split())

    def _node(self, host, resources, env=None):
        host.run(["sysctl", "-w", f"net.ipv4.ip_local_port_range={FREE_PORTS}"])
        host.run(["nft", "add table inet guard"])
        host.run(["nft", "add chain inet guard input { type filter hook input priority 0; policy accept; }"])
        opening = "iif != lo tcp flags & (syn | ack) == syn"
        host.run(["nft", f"add rule inet guard input {opening} tcp dport != {{ {OPEN_PORTS} }} drop"])
        return super()._node(host, resources, env)


@pytest.fixture(scope="module")
def guarded(network: HostNetwork) -> GuardedCluster:
    made = GuardedCluster(network, head=SEAT)
    made.add(SEAT)
    return made


@pytest.fixture
def driver(guarded: GuardedCluster) -> Iterator[Driver]:
    made = guarded.driver()
    yield made
    made.close()


def attempt(source: Host, target: Host, port: int) -> str:
    return source.run(["python3", "-c", ATTEMPT, target.ip, str(port)]).strip()


def test_guarded_hosts_drop_connections_to_other_ports(guarded):
    head, other = guarded.network.hosts[-2:]
    assert attempt(other, head, CLOSED_PORT) == "dropped"
    assert attempt(other, head, 6379) == ""


def test_engine_over_guarded_hosts_answers_as_one_worker(guarded, driver, checkpoint):
    path = guarded.network.directory / "answers-guarded"
    given = {
        "executor": "ray",
        "ray_address": guarded.address,
        "ray_worker_resources": SEAT,
        "ray_placement_strategy": "STRICT_SPREAD",
        "tensor_parallel_size": 2,
    }
    driver.do("answers", checkpoint=checkpoint, path=path, options=given, timeout=START_SECONDS)
    assert_agree(pickle.loads(path.read_bytes()), answers(checkpoint, executor="in-process"))


def test_engines_on_guarded_hosts_answer(guarded, driver, checkpoint):
    given = {
        "data_parallel_size": 2,
        "data_parallel_backend": "ray",
        "ray_address": guarded.address,
        "ray_worker_resources": SEAT,
    }
    driver.do("open_llm", checkpoint=checkpoint, options=given, timeout=START_SECONDS)
    first, *others = driver.do("tokens", prompts=[[5, 6, 7]] * 4, max_tokens=8)
    assert len(first) == 8 and others == [first] * 3
