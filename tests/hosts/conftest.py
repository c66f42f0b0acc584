"""Every test here needs root: without it they are skipped, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from ray_hosts import Driver, RayHosts
from simulated_hosts import HostNetwork, host_network, why_impossible


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostNetwork]:
    """A network without hosts. They live in it until they are killed, or to the end of the session."""
    if reason := why_impossible():
        pytest.skip(reason)
    with host_network(tmp_path_factory.mktemp("network")) as opened:
        yield opened


@pytest.fixture(scope="session")
def cluster(network: HostNetwork) -> RayHosts:
    """Three hosts that are a Ray cluster. Tests that harm a host take a spare one."""
    return RayHosts(network)


@pytest.fixture
def driver(cluster: RayHosts) -> Iterator[Driver]:
    """A program on the head, of this test alone."""
    made = cluster.driver()
    yield made
    made.close()


@pytest.fixture(scope="session")
def checkpoint(network: HostNetwork) -> Path:
    """Of a small model, where all hosts see it."""
    return make_checkpoint(network.directory / "qwen3", "qwen3")
