"""Isolation of simulated hosts, and their clean-up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import Program, wait_until
from simulated_hosts import Host, HostNetwork, host_network

pytestmark = pytest.mark.hosts

SECONDS = 20.0
LISTEN = """
import socket
server = socket.create_server(("{ip}", 0))
print(server.getsockname()[1], flush=True)
server.accept()[0].recv(1)
"""
CONNECT = "import socket; socket.create_connection(('{ip}', {port}), timeout=1)"


@pytest.fixture(scope="module")
def pair(network: HostNetwork) -> list[Host]:
    return [network.add(), network.add()]


def reach(source: Host, target: Host) -> None:
    """Raise `RuntimeError` unless `source` can connect to `target`."""
    server = target.start([sys.executable, "-c", LISTEN.format(ip=target.ip)])
    port = int(server.line(SECONDS))
    try:
        source.run([sys.executable, "-c", CONNECT.format(ip=target.ip, port=port)])
    finally:
        server.close()


def test_host_reaches_others_and_has_its_own_name(pair):
    reach(pair[0], pair[1])
    reach(pair[1], pair[0])
    assert [host.run(["hostname"]) for host in pair] == [host.name for host in pair]


@pytest.mark.parametrize("path", ["/tmp/note", "/dev/shm/note"])
def test_host_files_and_shared_memory_are_private(pair, path):
    pair[0].path(path).write_text("private")
    assert pair[0].run(["cat", path]) == "private"
    assert not pair[1].path(path).exists()
    assert not Path(path).exists()


def test_host_shares_the_networks_directory(pair, network):
    directory = network.directory
    (directory / "note").write_text("common")
    assert [host.run(["cat", str(directory / "note")]) for host in pair] == ["common"] * 2


def test_host_processes_are_isolated(pair):
    program = pair[1].start(["sleep", "600"])
    wait_until(lambda: "sleep 600" in pair[1].processes().values(), "sleep to run", SECONDS)
    assert "sleep 600" not in pair[0].processes().values()
    assert "sleep 600" not in pair[0].run([sys.executable, "-c", "import os; print(os.listdir('/proc'))"])
    program.close()


def test_cut_host_cannot_be_reached_until_it_is_healed(pair, network):
    network.cut(pair[1])
    with pytest.raises(RuntimeError, match="TimeoutError"):
        reach(pair[0], pair[1])
    network.heal(pair[1])
    reach(pair[0], pair[1])


def test_kill_ends_the_processes_of_a_host(network):
    host = network.add()
    host.start(["sleep", "600"])
    wait_until(host.processes, "sleep to run", SECONDS)
    host.kill()
    assert not host.processes()
    host.kill()


def test_host_network_that_is_closed_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), host_network(tmp_path) as network:
        host = network.add()
        host.start(["sleep", "600"])
        raise KeyboardInterrupt
    assert not host.processes()
    wait_until(lambda: not Path(f"/proc/{host.pid}").exists(), "the end of its first process", SECONDS)


def test_host_network_whose_program_is_killed_leaves_nothing(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from simulated_hosts import host_network\n"
        "with host_network(Path(sys.argv[1])) as network:\n"
        "    host = network.add(); host.start(['sleep', '600'])\n"
        "    print(host.pid, flush=True); time.sleep(600)\n"
    )
    tests = Program(
        [sys.executable, "-c", program, str(tmp_path)],
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        log=tmp_path / "tests.log",
    )
    first = int(tests.line(SECONDS))
    tests.close()
    wait_until(lambda: not Path(f"/proc/{first}").exists(), "the end of the host", SECONDS)
