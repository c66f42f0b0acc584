"""Fixtures for tests on several hosts. They need root: without it all tests are skipped, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from ray_hosts import Driver, RayHosts
from simulated_hosts import HostNetwork, host_network, why_impossible


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostNetwork]:
    """Open a network without hosts. Hosts that are added run until they are killed, or to the end of the session."""
    if reason := why_impossible():
        pytest.skip(reason)
    with host_network(tmp_path_factory.mktemp("network")) as opened:
        yield opened


@pytest.fixture(scope="session")
def cluster(network: HostNetwork) -> RayHosts:
    """Start three hosts as a Ray cluster. Tests that harm a host use a spare one."""
    return RayHosts(network)


@pytest.fixture
def driver(cluster: RayHosts) -> Iterator[Driver]:
    """Start a program on the head for this test only."""
    made = cluster.driver()
    yield made
    made.close()


@pytest.fixture(scope="session")
def checkpoint(network: HostNetwork) -> Path:
    """Create a checkpoint of a small model in a directory that all hosts share."""
    return make_checkpoint(network.directory / "qwen3", "qwen3")
