"""A Ray cluster of two nodes on this machine, and round trips through Ray alone: for benchmarks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.dag import InputNode

from eagleray.cluster.connect import connect

OBJECT_STORE_BYTES = 128 * 2**20
SECOND_ADDRESS = "127.0.0.2"


class Echo:
    def echo(self, payload: bytes) -> bytes:
        return payload


@dataclass(frozen=True)
class SimulatedCluster:
    address: str
    resources: Mapping[str, str]
    """local, remote -> the resource that only that node has"""

    def baselines(self, payload: bytes) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield names and round trips of `payload`: an actor call, and a compiled graph of one actor."""
        connection = connect(self.address, namespace="baselines")
        try:
            echo: Any = ray.remote(Echo).options(num_cpus=0, resources={self.resources["local"]: 1}).remote()
            yield "Ray actor call", lambda: ray.get(echo.echo.remote(payload))
            with InputNode() as message:
                graph = echo.echo.bind(message)
            compiled = graph.experimental_compile()
            yield "Ray compiled graph", lambda: ray.get(compiled.execute(payload))
            compiled.teardown()
        finally:
            connection.close()


@contextmanager
def open_cluster(num_workers: int, *, remote: bool) -> Iterator[SimulatedCluster]:
    """Run a cluster with room for `num_workers` on each node; its processes exit with the context."""
    # Ray's workers would otherwise run at low priority; the figures are those of a cluster started as the README says.
    os.environ.setdefault("RAY_worker_niceness", "0")
    options: dict[str, Any] = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "resources": {"local": num_workers}})
    try:
        resources = {"local": "local"}
        if remote:
            cluster.add_node(**options, resources={"remote": num_workers}, node_ip_address=SECOND_ADDRESS)
            resources["remote"] = "remote"
        yield SimulatedCluster(cluster.address, resources)
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
