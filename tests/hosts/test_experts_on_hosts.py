"""Engines that share their experts, on two hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from harness import LocalEngine
from programs import wait_until
from ray_hosts import Driver, RayHosts, workers
from simulated_hosts import Host, HostNetwork

pytestmark = pytest.mark.hosts

PROMPTS = [[5 + row, 6, 7] for row in range(4)]
MAX_TOKENS = 40
STOP_TIMEOUT_SECONDS = 10.0
RESTART_SECONDS = 90.0


@pytest.fixture(scope="module")
def mixture(network: HostNetwork) -> Path:
    """Create a checkpoint of a small model with experts in a directory that all hosts share."""
    return make_checkpoint(network.directory / "qwen3_moe", "qwen3_moe")


@pytest.fixture(scope="module")
def expected(mixture: Path) -> list[list[int]]:
    """Return the tokens of one engine that has all experts."""
    with LocalEngine(mixture, dtype="float32") as engine:
        for index, prompt in enumerate(PROMPTS):
            engine.add(str(index), prompt, max_tokens=MAX_TOKENS)
        return [answer.token_ids for answer in engine.run().values()]


@pytest.fixture(params=["all-gather", "all-to-all"])
def host(cluster: RayHosts, driver: Driver, mixture: Path, request: pytest.FixtureRequest) -> Iterator[Host]:
    """Open two engines: the first one on the head, the second one on the host that is yielded."""
    host, resource = cluster.spare()
    options = {
        "executor": "ray",
        "dtype": "float32",
        "data_parallel_backend": "ray",
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "expert_dispatch": request.param,
        "ray_engine_placement": "strict-spread",
        "ray_address": cluster.address,
        "ray_worker_resources": {resource: 1},
    }
    driver.do("open_llm", checkpoint=mixture, options=options)
    assert len(workers(host)) == len(workers(cluster.head)) == 2  # an engine and its worker
    yield host
    driver.do("close", timeout=30)
    for each in (cluster.head, host):
        wait_until(lambda each=each: not workers(each), f"no worker is left on {each.name}", STOP_TIMEOUT_SECONDS)
    host.kill()


def test_expert_parallel_engines_on_two_hosts_answer_as_one_engine_also_after_a_kill(driver, host, expected):
    assert driver.do("tokens", prompts=PROMPTS, max_tokens=MAX_TOKENS) == expected
    driver.begin("generate_until", seconds=12)  # every round must give the tokens of the first
    driver.wait_for("round")
    former = set(workers(host))
    os.kill(min(former), signal.SIGKILL)
    assert driver.result(RESTART_SECONDS) > 1
    assert driver.do("tokens", prompts=PROMPTS, max_tokens=MAX_TOKENS) == expected
    assert len(workers(host)) == 2 and set(workers(host)) != former


def test_expert_parallel_idle_engine_on_another_host_lets_the_other_proceed(driver, host, expected):
    assert driver.do("tokens", prompts=PROMPTS[:1], max_tokens=MAX_TOKENS) == expected[:1]
