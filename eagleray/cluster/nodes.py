"""Nodes of the cluster, as values, and whether the cluster may get more of them."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from eagleray.cluster.timeouts import AUTOSCALER_REPORT_SECONDS, POLL_INTERVAL_SECONDS
from eagleray.errors import ClusterError

MIN_PREFIX = 8
"""Digits of a node's id that are enough to name it: the labels here have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    node_id: str
    """Identity of the node. The IP is only for connecting to it: two nodes may share one."""
    ip: str
    hostname: str = ""
    is_alive: bool
    total: Mapping[str, float]
    free: Mapping[str, float]
    """Resources that nothing holds, according to the control store: some 100 ms old."""
    group: str = ""
    """Node type as which an autoscaler or KubeRay started the node."""
    death: str = ""
    """Reason of its death, if Ray gives one."""
    drain_deadline: float | None = None
    """Unix time at which a node that drains goes, infinite if that is not known; None if it does not drain."""

    @property
    def label(self) -> str:
        """Name of the node in messages."""
        return f"{self.ip} ({self.node_id[:MIN_PREFIX]})"

    @property
    def is_draining(self) -> bool:
        """Whether the node is to go, so that Ray starts nothing on it."""
        return self.is_alive and self.drain_deadline is not None

    def is_named(self, name: str) -> bool:
        """Whether `name` is the node's id, a prefix of that, its host name or its address."""
        by_id = len(name) >= MIN_PREFIX and self.node_id.startswith(name)
        return by_id or name in (self.node_id, self.ip) or (name != "" and name == self.hostname)


def select_nodes(nodes: Sequence[Node], names: Sequence[str], *, with_draining: bool = False) -> list[Node]:
    """Return the nodes that `names` name, or all without names; nodes that drain only `with_draining`. Raises
    `ClusterError` for a name of no node."""
    for name in names:
        if not any(node.is_named(name) for node in nodes):
            known = ", ".join(f"{node.label} {node.hostname}".rstrip() for node in nodes if node.is_alive)
            raise ClusterError(
                f"option `ray_nodes`: no node is {name!r}; give addresses, host names, or ids (8 digits or more) of "
                f"these: {known or 'none is alive'}"
            )
    return [
        node
        for node in nodes
        if (with_draining or not node.is_draining) and (not names or any(node.is_named(name) for name in names))
    ]


def list_nodes() -> list[Node]:
    """Return every node that has been in the cluster, in order of node id."""
    import ray
    from ray._private.state import available_resources_per_node, state

    infos = ray.nodes()  # type: ignore[no-untyped-call]
    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    draining = {node_id: millis / 1000 or math.inf for node_id, millis in state.get_draining_nodes().items()}
    return [
        Node(
            node_id=info["NodeID"],
            ip=info["NodeManagerAddress"],
            hostname=info.get("NodeManagerHostname", ""),
            is_alive=info["Alive"],
            total=info["Resources"],
            free=free.get(info["NodeID"], {}),
            group=info.get("Labels", {}).get("ray.io/node-group", ""),
            death=info.get("DeathReasonMessage", ""),
            drain_deadline=draining.get(info["NodeID"]),
        )
        for info in sorted(infos, key=lambda info: str(info["NodeID"]))
    ]


def address_of(node_id: str) -> str:
    """Return the IP of a node that is, or has been, in the cluster."""
    return next(node.ip for node in list_nodes() if node.node_id == node_id)


def can_grow(nodes: Sequence[Node]) -> bool | None:
    """Whether an autoscaler manages the cluster; None if that is not known yet, in the cluster's first seconds.

    Ray has no such question, so this collects what autoscalers leave behind. A wrong no would refuse an engine in a
    cluster that grows; a wrong yes costs a wait until `ray_placement_timeout`. Any of three signs is enough. First, a
    node with a node group: cluster launchers and KubeRay start nodes with RAY_NODE_TYPE_NAME, which Ray makes the label
    ray.io/node-group; `ray start` by hand does not. Second, the control store says that the second generation of the
    autoscaler is enabled, which only a user does. Third, the report that the first generation writes there, from some
    seconds after the cluster's start on, names node types.
    """
    from ray._private import ray_constants
    from ray.experimental.internal_kv import _internal_kv_get

    if any(node.group for node in nodes) or _is_second_generation():
        return True
    status = _internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS)
    report = None if status is None else msgspec.json.decode(status).get("autoscaler_report")
    if report is not None:
        return manages_nodes(report)
    is_young = time.monotonic() < _first_asked() + AUTOSCALER_REPORT_SECONDS
    return None if is_young and not _is_local_cluster() else False


def check_cluster_can_hold(explain_shortage: Callable[[Sequence[Node]], str | None]) -> None:
    """Raise `ClusterError` if the nodes, with nothing on them, are too few or too small, and none can be added.

    `explain_shortage` returns a sentence for such nodes, else None. Waits until it is known whether an autoscaler may
    add nodes, at most `AUTOSCALER_REPORT_SECONDS`.
    """
    while (shortage := explain_shortage(nodes := list_nodes())) is not None:
        grows = can_grow(nodes)
        if grows is False:
            raise ClusterError(shortage)
        if grows:
            return
        time.sleep(POLL_INTERVAL_SECONDS)


def manages_nodes(report: dict[str, Any]) -> bool:
    """Whether a report comes from an autoscaler that starts nodes. One that only watches invents a node type for each
    node, named `node_` and its id."""
    types = set(report.get("active_nodes") or {}) | set(report.get("pending_launches") or {})
    pending = bool(report.get("pending_nodes") or report.get("failed_nodes"))
    invented = {f"node_{node_id}" for node_id in report.get("node_type_mapping") or {}}
    return pending or not types <= invented


def _is_second_generation() -> bool:
    from ray._raylet import (  # type: ignore[attr-defined]
        GCS_AUTOSCALER_STATE_NAMESPACE,
        GCS_AUTOSCALER_V2_ENABLED_KEY,
    )
    from ray.experimental.internal_kv import _internal_kv_get

    enabled = _internal_kv_get(
        GCS_AUTOSCALER_V2_ENABLED_KEY.encode(), namespace=GCS_AUTOSCALER_STATE_NAMESPACE.encode()
    )
    return bool(enabled == b"1")


def _is_local_cluster() -> bool:
    """Whether this process has started the cluster: then it is this host alone, and stays that."""
    from ray._private import worker

    node = worker._global_node
    return node is not None and bool(node.head)


@functools.cache
def _first_asked() -> float:
    return time.monotonic()
