"""Hosts that die, are disconnected or hang while requests run: the client's error names the worker, within seconds.

Each test harms a host of its own; the engine and its client are on the head.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from programs import wait_until
from ray_hosts import Driver, Failure, RayHosts, workers
from simulated_hosts import Host

pytestmark = pytest.mark.hosts

EXECUTORS = ("ray", "ray-graph")

LIMIT = 3.0
"""Value of `heartbeat_timeout` in tests of missing heartbeats."""

SLACK = 3.0
"""Time after the timeout for one heartbeat interval, the check, and the report to the client."""

RAY_SECONDS = 4.0
"""Time for Ray to notice a lost host: a second or two. Our own heartbeat must be slower here."""

STOP_TIMEOUT_SECONDS = 10.0


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_llm(driver: Driver, cluster: RayHosts, checkpoint: Any, executor: str, *, limit: float) -> Host:
    """Open an engine with a worker on the head and one on the host that is returned, and start requests."""
    host, resource = cluster.spare()
    options = {
        "executor": executor,
        "tensor_parallel_size": 2,
        "ray_address": cluster.address,
        "ray_placement_strategy": "STRICT_SPREAD",
        "ray_worker_resources": {resource: 1},
        "heartbeat_timeout": limit,
        "max_engine_restarts": 0,  # otherwise the client would wait without an error
    }
    driver.do("open_llm", checkpoint=checkpoint, options=options)
    assert len(workers(host)) == 1
    driver.begin("generate_until_it_fails")
    driver.wait_for("round")
    return host


def failure(driver: Driver) -> Failure:
    """Return the error that the client received."""
    with pytest.raises(Failure) as caught:
        driver.result()
    assert caught.value.kind == "EngineFailed"
    return caught.value


def assert_closes(driver: Driver, cluster: RayHosts) -> None:
    """Check that the client closes the engine in bounded time, and that nothing is left on the head."""
    driver.do("close", timeout=30)
    wait_until(lambda: not workers(cluster.head), "no worker is left on the head", STOP_TIMEOUT_SECONDS)
    found = driver.do("cluster", address=cluster.address)
    assert found["actors"] == found["groups"] == []


def test_host_that_dies_is_named_to_the_client(cluster, driver, checkpoint, executor):
    host = open_llm(driver, cluster, checkpoint, executor, limit=60)
    killed = time.monotonic()
    host.kill()
    error = failure(driver)
    assert "tp1-pp0" in str(error)
    assert host.ip in str(error)
    assert error.when - killed < RAY_SECONDS
    assert_closes(driver, cluster)


@pytest.mark.parametrize("how", ["dies", "is cut off"])
def test_lost_host_engines_on_other_hosts_take_over(cluster, driver, checkpoint, how):
    """Two engines are actors on a host of their own each. Requests continue with equal tokens."""
    host, resource = cluster.spare()
    options = {
        "executor": "in-process",
        "data_parallel_backend": "ray",
        "data_parallel_size": 2,
        "ray_engine_placement": "strict-spread",
        "ray_address": cluster.address,
        "ray_worker_resources": {resource: 1},
        "heartbeat_timeout": LIMIT,
    }
    driver.do("open_llm", checkpoint=checkpoint, options=options)
    assert len(workers(host)) == len(workers(cluster.head)) == 1
    driver.begin("generate_until_it_fails")
    driver.wait_for("round")
    lost = time.monotonic()
    host.kill() if how == "dies" else cluster.network.cut(host)
    while driver.wait_for("round") < lost + LIMIT + SLACK:
        pass
    driver.close()
    wait_until(lambda: not workers(cluster.head), "no worker is left on the head", STOP_TIMEOUT_SECONDS)
    if how != "dies":
        wait_until(lambda: not workers(host), "the engine exits", LIMIT + SLACK)
        host.kill()


def test_disconnected_host_worker_exits_and_is_named_to_the_client(cluster, driver, checkpoint, executor):
    host = open_llm(driver, cluster, checkpoint, executor, limit=LIMIT)
    cut = time.monotonic()
    cluster.network.cut(host)
    wait_until(lambda: not workers(host), "the worker exits", LIMIT + SLACK)
    error = failure(driver)
    assert "tp1-pp0" in str(error) and "silent" in str(error)
    assert error.when - cut < LIMIT + SLACK
    assert_closes(driver, cluster)
    host.kill()


def test_hung_worker_is_named_to_the_client(cluster, driver, checkpoint, executor):
    host = open_llm(driver, cluster, checkpoint, executor, limit=LIMIT)
    stopped = time.monotonic()
    (worker,) = workers(host)
    os.kill(worker, signal.SIGSTOP)
    error = failure(driver)
    assert "tp1-pp0" in str(error) and "silent" in str(error)
    assert error.when - stopped < LIMIT + SLACK
    assert_closes(driver, cluster)
    wait_until(lambda: not workers(host), "the stopped worker is killed", STOP_TIMEOUT_SECONDS)
    host.kill()


def test_short_disconnection_is_survived(cluster, driver, checkpoint, executor):
    host = open_llm(driver, cluster, checkpoint, executor, limit=60)
    cluster.network.cut(host)
    time.sleep(1)
    cluster.network.heal(host)
    for _ in range(3):
        driver.wait_for("round")
    driver.close()
    wait_until(lambda: not workers(host), "the worker exits with its engine", STOP_TIMEOUT_SECONDS)
    host.kill()


def test_killed_engine_workers_on_all_hosts_exit(cluster, driver, checkpoint, executor):
    host = open_llm(driver, cluster, checkpoint, executor, limit=60)
    driver.close()
    for each in (cluster.head, host):
        wait_until(lambda each=each: not workers(each), f"no worker is left on {each.name}", STOP_TIMEOUT_SECONDS)
    host.kill()
