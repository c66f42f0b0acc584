"""Resources of the cluster that a program is connected to, or that it would join or start. Does not connect."""

from __future__ import annotations

import ray
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from eagleray.cluster.bundles import Resources
from eagleray.cluster.connect import check_cluster, find_cluster
from eagleray.cluster.nodes import list_nodes
from eagleray.cluster.timeouts import PREFLIGHT_SECONDS

ALIVE = 0
"""State of a living node in the control store."""


def offered_resources() -> list[Resources]:
    """Return all resources of each living node of the cluster that `ray.init` without an address joins.

    Where no cluster runs it starts one, so the GPUs of this host are returned. Raises `ClusterError` for a cluster that
    cannot be joined.
    """
    if ray.is_initialized():
        return [node.total for node in list_nodes() if node.is_alive]
    address = find_cluster(None)
    if address is None:
        gpus = get_accelerator_manager_for_resource("GPU")
        return [{"GPU": float(gpus.get_current_node_num_accelerators()) if gpus else 0.0}]
    check_cluster(address)
    nodes = GcsClient(address=address).get_all_node_info(timeout=PREFLIGHT_SECONDS).values()
    return [dict(node.resources_total) for node in nodes if node.state == ALIVE]
