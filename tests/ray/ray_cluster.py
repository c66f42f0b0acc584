"""Helpers for tests on the cluster: configurations, and its nodes, actors and placement groups."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import ray
from ray._private.state import actors
from ray.util.placement_group import placement_group_table, remove_placement_group

from eagleray.cluster import placement_groups
from eagleray.cluster.nodes import list_nodes
from eagleray.config.build import build_config
from eagleray.config.sections import Config
from eagleray.identity import EngineId, new_instance_name

MakeGroup = Callable[..., str]
"""Creates a placement group of these bundles and returns its id."""

AddNode = Callable[..., Callable[[], None]]
"""Adds a node to the cluster and returns a function that removes it."""

ACC = {"acc": 1.0}
FAR = {"far": 1.0}

NO_IDLE_WORKERS = {"RAY_prestart_worker_first_driver": "0"}
"""Environment of clusters that start no worker process for each processor before somebody needs one."""

PREFIX = new_instance_name()
numbers = itertools.count()


def new_engine() -> EngineId:
    return EngineId(f"{PREFIX}-{next(numbers)}", 0)


def config(tp: int = 1, pp: int = 1, *, resources: dict[str, float] | None = None, **options: Any) -> Config:
    """Return the configuration of an engine whose workers take an "acc" each."""
    return build_config(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        ray_worker_resources=ACC if resources is None else resources,
        **{"executor": "ray", "ray_placement_timeout": 20.0, "startup_timeout": 60.0, "device": "cpu", **options},
    )


def node_ips() -> dict[str, str]:
    return {node.node_id: node.ip for node in list_nodes()}


def here() -> str:
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def pid_of(name: str) -> int:
    """Return the process of the living actor with that name."""
    (pid,) = [entry["Pid"] for entry in actors().values() if entry["Name"] == name and entry["State"] == "ALIVE"]
    return int(pid)


def living_actors() -> list[dict[str, Any]]:
    return [entry for entry in actors().values() if entry["State"] == "ALIVE"]


def actors_and_groups() -> list[str]:
    """Return every actor that is not dead and every placement group that is not removed."""
    living = [entry["Name"] for entry in actors().values() if entry["State"] != "DEAD"]
    there = [f"group {e['name'] or i}" for i, e in placement_group_table().items() if e["state"] != "REMOVED"]
    return living + there


def clear() -> None:
    """Remove the actors and placement groups that a failed test has left."""
    for group_id, entry in placement_group_table().items():
        if entry["state"] != "REMOVED":
            remove(group_id)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def num_living_nodes() -> int:
    return sum(node.is_alive for node in list_nodes())


def is_all_free() -> bool:
    return all(
        node.free.get(name, 0) == node.total.get(name, 0)
        for node in list_nodes()
        if node.is_alive
        for name in ("CPU", "GPU", "acc", "far")
    )


def drain(ip: str, *, seconds: float) -> None:
    """Give notice that a node is to go, as a cloud provider does through KubeRay or an autoscaler."""
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    (node_id,) = [node.node_id for node in list_nodes() if node.is_alive and node.ip == ip]
    store = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    preemption = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    is_accepted, why_not = store.drain_node(node_id, preemption, "spot", int((time.time() + seconds) * 1000))
    assert is_accepted, why_not


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def remove(group_id: str) -> None:
    remove_placement_group(placement_groups.handle(group_id))
