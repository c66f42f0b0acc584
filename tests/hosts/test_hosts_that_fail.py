"""A host dies, is cut off or hangs while requests run: their client is told which worker it was, and soon.

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
"""`heartbeat_timeout` where silence is what is to be noticed."""

SLACK = 3.0
"""For what happens after the silence was long enough: a beat, a look, and the news on its way to the client."""

RAY_SECONDS = 4.0
"""Ray notices within a second or two that a host is gone. Our own heartbeat must be slower here."""

END_SECONDS = 10.0


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_llm(driver: Driver, cluster: RayHosts, checkpoint: Any, executor: str, *, limit: float) -> Host:
    """An engine with a worker on the head and one on the host that is returned; requests run."""
    host, resource = cluster.spare()
    options = {
        "executor": executor,
        "tensor_parallel_size": 2,
        "ray_address": cluster.address,
        "ray_placement_strategy": "STRICT_SPREAD",
        "ray_worker_resources": {resource: 1},
        "heartbeat_timeout": limit,
        "max_engine_restarts": 0,  # else the client would be told nothing, and wait
    }
    driver.do("open_llm", checkpoint=checkpoint, options=options)
    assert len(workers(host)) == 1
    driver.begin("generate_until_it_fails")
    driver.wait_for("round")
    return host


def failure(driver: Driver) -> Failure:
    """What the client was told."""
    with pytest.raises(Failure) as caught:
        driver.result()
    assert caught.value.kind == "EngineFailed"
    return caught.value


def assert_closes(driver: Driver, cluster: RayHosts) -> None:
    """The client's process ends the rest in bounded time, and nothing is left on the head."""
    driver.do("close", timeout=30)
    wait_until(lambda: not workers(cluster.head), "no worker is left on the head", END_SECONDS)
    found = driver.do("cluster", address=cluster.address)
    assert found["actors"] == found["groups"] == []


def test_a_host_that_dies(cluster, driver, checkpoint, executor):
    host = open_llm(driver, cluster, checkpoint, executor, limit=60)
    killed = time.monotonic()
    host.kill()
    told = failure(driver)
    assert "tp1-pp0" in str(told)
    assert host.ip in str(told)
    assert told.when - killed < RAY_SECONDS
    assert_closes(driver, cluster)


@pytest.mark.parametrize("how", ["dies", "is cut off"])
def test_engines_on_other_hosts_take_over(cluster, driver, checkpoint, how):
    """Two engines, each an actor on a host of its own. Requests go on, with equal tokens."""
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
    wait_until(lambda: not workers(cluster.head), "no worker is left on the head", END_SECONDS)
    if how != "dies":
        wait_until(lambda: not workers(host), "the engine ends itself", LIMIT + SLACK)
        host.kill()


def test_a_host_that_is_cut_off(cluster, driver, checkpoint, executor):
    host = open_llm(driver, cluster, checkpoint, executor, limit=LIMIT)
    cut = time.monotonic()
    cluster.network.cut(host)
    wait_until(lambda: not workers(host), "the worker ends itself", LIMIT + SLACK)
    told = failure(driver)
    assert "tp1-pp0" in str(told) and "silent" in str(told)
    assert told.when - cut < LIMIT + SLACK
    assert_closes(driver, cluster)
    host.kill()


def test_a_worker_that_hangs(cluster, driver, checkpoint, executor):
    host = open_llm(driver, cluster, checkpoint, executor, limit=LIMIT)
    stopped = time.monotonic()
    (worker,) = workers(host)
    os.kill(worker, signal.SIGSTOP)
    told = failure(driver)
    assert "tp1-pp0" in str(told) and "silent" in str(told)
    assert told.when - stopped < LIMIT + SLACK
    assert_closes(driver, cluster)
    wait_until(lambda: not workers(host), "the stopped worker is ended", END_SECONDS)
    host.kill()


def test_a_short_cut_is_survived(cluster, driver, checkpoint, executor):
    host = open_llm(driver, cluster, checkpoint, executor, limit=60)
    cluster.network.cut(host)
    time.sleep(1)
    cluster.network.heal(host)
    for _ in range(3):
        driver.wait_for("round")
    driver.close()
    wait_until(lambda: not workers(host), "the worker ends with its engine", END_SECONDS)
    host.kill()


def test_an_engine_that_is_killed_takes_its_workers_with_it(cluster, driver, checkpoint, executor):
    host = open_llm(driver, cluster, checkpoint, executor, limit=60)
    driver.close()
    for each in (cluster.head, host):
        wait_until(lambda each=each: not workers(each), f"no worker is left on {each.name}", END_SECONDS)
    host.kill()
