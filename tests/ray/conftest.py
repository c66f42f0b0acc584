"""Fixtures around one Ray cluster of four nodes; a test that leaves anything in the cluster fails.

The nodes are processes of this machine with addresses of their own. The workers of a test engine take "acc"; the
head has it too, because the tests and thus the engines run there; "far" is only on other nodes.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_cluster
from ray.util.placement_group import placement_group

from eagleray.cluster.connect import connect
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

LEFT_SECONDS = 3.0
NUM_NODES = 4
made_clusters: dict[str, Any] = {}
SMALL_NODE = {"include_dashboard": False, "include_log_monitor": False, "object_store_memory": 80 << 20}
"""Options of every node. The log monitor would poll the files of all workers, and no test reads it."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Yield the address of the cluster. This process is a driver of it, and its engines reuse that connection."""
    root = Path(tempfile.mkdtemp(prefix="er-"))  # short: the path of a Unix socket has at most 107 characters
    (root / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        # A cluster of its own in every respect: address file, logs, authentication.
        patch.setenv("RAY_TMPDIR", str(root))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_health_check_period_ms", "500")
        patch.setenv("RAY_health_check_timeout_ms", "1000")
        patch.setenv("RAY_health_check_failure_threshold", "3")
        patch.setenv("REPORTER_UPDATE_INTERVAL_MS", "600000")  # statistics for dashboards, by an agent of each node
        for name, value in ray_cluster.NO_IDLE_WORKERS.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, root, ignore_errors=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from ray.cluster_utils import Cluster

                made = Cluster(initialize_head=True, head_node_args=_node(num_cpus=4, acc=2))
                stack.callback(_without_warnings, made.shutdown)  # also when a further node does not start in time
                made.add_node(**_node(num_cpus=2, num_gpus=2, acc=2, far=2, address="127.0.0.2"))
                made.add_node(**_node(num_cpus=1, num_gpus=1, acc=2, far=2, address="127.0.0.3"))
                made.add_node(**_node(num_cpus=1, acc=1, address="127.0.0.4"))
            connection = connect(made.address, namespace="tests")
            stack.callback(_without_warnings, connection.close)
            made_clusters[connection.address] = made
            yield connection.address


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: str) -> Iterator[None]:
    """Check that no actor and no placement group outlives the test, so that the next one finds everything free."""
    yield
    ray_cluster.wait_until(lambda: not ray_cluster.actors_and_groups(), LEFT_SECONDS)
    left = ray_cluster.actors_and_groups()
    ray_cluster.clear()
    assert not left
    assert ray_cluster.wait_until(ray_cluster.is_all_free, LEFT_SECONDS)
    assert ray_cluster.num_living_nodes() >= NUM_NODES


@pytest.fixture
def add_node(cluster: str) -> Iterator[ray_cluster.AddNode]:
    """Return a function that adds nodes for this test only."""
    made = made_clusters[cluster]
    added: list[Any] = []

    def add(**options: Any) -> Callable[[], None]:
        node = made.add_node(num_cpus=0, **SMALL_NODE, **options)
        added.append(node)

        def remove() -> None:
            added.remove(node)
            made.remove_node(node)

        return remove

    yield add
    for node in added:
        made.remove_node(node)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Yield a directory for sockets, which must be empty at the end of the test."""
    path = make_runtime_dir()
    yield path
    left = sorted(path.iterdir())
    remove_runtime_dir(path)
    assert not left


@pytest.fixture
def make_group() -> Iterator[ray_cluster.MakeGroup]:
    """Return a function that creates placement groups as a user does; they are removed at the end."""
    made: list[str] = []

    def make(*bundles: dict[str, float], strategy: str = "PACK", name: str = "", **options: Any) -> str:
        group = placement_group(list(bundles), strategy=strategy, name=name, **options)
        assert group.wait(10)
        made.append(group.id.hex())
        return made[-1]

    yield make
    for group_id in made:
        ray_cluster.remove(group_id)


def _without_warnings(action: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        action()


def _node(*, num_cpus: int, acc: int, num_gpus: int = 0, far: int = 0, address: str | None = None) -> dict[str, object]:
    options: dict[str, object] = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "resources": {"acc": acc, **({"far": far} if far else {})},
        **SMALL_NODE,
    }
    if address is not None:
        options["node_ip_address"] = address
    return options
