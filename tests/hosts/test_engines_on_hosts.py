"""Engines whose workers are on several hosts: equal answers, placement, listening sockets and clean-up."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agreement import answers, assert_agree
from harness import Answer
from programs import wait_until
from ray_hosts import Driver, Failure, RayHosts, workers
from simulated_hosts import Host

pytestmark = pytest.mark.hosts

EXECUTORS = ("ray", "ray-graph")
STOP_TIMEOUT_SECONDS = 5.0
ANYWHERE = ("0.0.0.0", "::")


@pytest.fixture(scope="module")
def steady(cluster: RayHosts) -> Iterator[Driver]:
    """Start one driver for all tests of this file, which do not harm it."""
    made = cluster.driver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, Answer]:
    return answers(checkpoint, executor="in-process", async_scheduling=False)


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: RayHosts, steady: Driver) -> Iterator[None]:
    """Check that no actor, placement group, process, socket or shared memory outlives an engine, on any host."""
    yield
    steady.do("close")
    assert_nothing_is_left(cluster.hosts)
    found = steady.do("cluster", address=cluster.address)
    assert found["actors"] == found["groups"] == []


def assert_nothing_is_left(hosts: list[Host]) -> None:
    for host in hosts:
        wait_until(lambda host=host: not workers(host), f"no worker is left on {host.name}", STOP_TIMEOUT_SECONDS)
        assert not list(host.path("/tmp").glob("eagleray-*"))
        assert not list(host.path("/dev/shm").glob("*eagleray*"))


def options(cluster: RayHosts, executor: str, resource: str, **more: Any) -> dict[str, Any]:
    return {
        "executor": executor,
        "ray_address": cluster.address,
        "ray_worker_resources": {resource: 1},
        "ray_placement_strategy": "STRICT_SPREAD",
        "heartbeat_timeout": 30,
        **more,
    }


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("tp", "pp", "strategy"), [(2, 1, "STRICT_SPREAD"), (1, 2, "STRICT_SPREAD"), (2, 2, "SPREAD")])
def test_engine_on_two_hosts_answers_as_one_worker(cluster, steady, checkpoint, expected, executor, tp, pp, strategy):
    path = cluster.network.directory / f"answers-{executor}-{tp}-{pp}"
    given = options(
        cluster,
        executor,
        "duo",
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        ray_placement_strategy=strategy,
    )
    steady.do("answers", checkpoint=checkpoint, path=path, options=given)
    assert_agree(pickle.loads(path.read_bytes()), expected)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_engine_on_three_hosts_has_the_first_rank_on_its_own(cluster, steady, checkpoint, executor):
    given = options(cluster, executor, "trio", pipeline_parallel_size=3)
    opened = steady.do("open", checkpoint=checkpoint, options=given)
    assert opened["addresses"][0] == cluster.head.ip
    assert sorted(opened["addresses"]) == sorted(host.ip for host in cluster.hosts)
    assert len(steady.do("step")) == 8
    steady.do("close")
    nodes = steady.do("cluster", address=cluster.address)["nodes"]
    assert [nodes[node] for node in opened["nodes"]] == opened["addresses"]


def test_queue_is_reached_by_tcp_from_other_hosts_only(cluster, steady, checkpoint):
    steady.do("open", checkpoint=checkpoint, options=options(cluster, "ray", "duo", tensor_parallel_size=2))
    own = {
        s.local for s in cluster.head.sockets(steady.pid) if s.state == "listening" and s.local[0] == cluster.head.ip
    }
    assert own
    local, remote = ([s.remote for pid in workers(host) for s in host.sockets(pid)] for host in cluster.hosts[:2])
    assert own <= set(remote)
    assert not own & set(local)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_engine_processes_listen_on_every_address_only_where_ray_does(cluster, steady, checkpoint, executor):
    plain = cluster.driver()
    plain.do("join", address=cluster.address)
    rays_own = len(listening_anywhere(cluster.head, plain.pid))
    plain.close()
    steady.do("open", checkpoint=checkpoint, options=options(cluster, executor, "duo", tensor_parallel_size=2))
    processes = [(cluster.head, steady.pid)] + [(host, pid) for host in cluster.hosts[:2] for pid in workers(host)]
    assert len(processes) == 3
    assert {pid: len(listening_anywhere(host, pid)) for host, pid in processes} == {
        pid: rays_own for _, pid in processes
    }


def test_supervisor_outside_the_head_replaces_a_killed_engine(cluster, checkpoint):
    """Two engines run on the head and on another host. The one on the head is killed; its replacement answers alike."""
    supervised = {
        "executor": "in-process",
        "data_parallel_backend": "ray",
        "data_parallel_size": 2,
        "ray_engine_placement": "strict-spread",
        "ray_address": cluster.address,
        "ray_worker_resources": {"duo": 1},
    }
    away = cluster.driver(on=cluster.hosts[2])
    try:
        before = [set(workers(host)) for host in cluster.hosts]
        away.do("open_llm", checkpoint=checkpoint, options=supervised)
        started = [set(workers(host)) - known for host, known in zip(cluster.hosts, before, strict=True)]
        assert [len(pids) for pids in started] == [1, 1, 0]
        expected = away.do("tokens", prompts=[[5, 6, 7]], max_tokens=20)
        away.begin("generate_until", seconds=10)  # every round must give the tokens of the first
        away.wait_for("round")
        os.kill(min(started[0]), signal.SIGKILL)
        assert away.result() > 1
        assert away.do("tokens", prompts=[[5, 6, 7]], max_tokens=20) == expected
        away.do("close", timeout=30)
    finally:
        away.close()


def listening_anywhere(host: Host, pid: int) -> list[int]:
    """Return the ports at which a process listens on every address."""
    return [s.local[1] for s in host.sockets(pid) if s.state == "listening" and s.local[0] in ANYWHERE]


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ({}, "wants an authentication token, but this program shows none"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, "does not accept the authentication token"),
    ],
    ids=["none", "wrong"],
)
def test_engine_without_the_clusters_token_is_refused(cluster, checkpoint, token, message):
    stranger = cluster.driver(env=token)
    with pytest.raises(Failure, match=f"ClusterError.*{message}"):
        stranger.do("open", checkpoint=checkpoint, options=options(cluster, "ray", "duo", tensor_parallel_size=2))
    stranger.close()


def test_engine_on_a_node_with_another_version_is_refused(cluster, steady, checkpoint, tmp_path_factory):
    packages = cluster.network.directory / "other-version"
    (packages / "eagleray-99.0.dist-info").mkdir(parents=True)
    (packages / "eagleray-99.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: eagleray\nVersion: 99.0\n"
    )
    host, resource = cluster.spare(env={"PYTHONPATH": str(packages)})
    with pytest.raises(Failure, match=rf"ClusterError: .*tp1-pp0 on node {host.name} runs eagleray 99\.0,"):
        steady.do("open", checkpoint=checkpoint, options=options(cluster, "ray", resource, tensor_parallel_size=2))
    assert_nothing_is_left([host])
    host.kill()
