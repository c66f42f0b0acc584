"""Whether the cluster may get more nodes than it has.

Ray has no such question, so this collects what autoscalers leave behind. It shall not say no to a cluster that grows;
a yes about one that does not costs a wait until `ray_placement_timeout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from ray._private import ray_constants
from ray.experimental.internal_kv import _internal_kv_get

from eagleray.cluster.nodes import Node

__all__ = ["can_grow", "manages_nodes"]


def can_grow(nodes: Sequence[Node]) -> bool:
    """Whether an autoscaler is at work.

    Either of two signs will do. A node of a named group: cluster launchers and KubeRay start nodes with
    RAY_NODE_TYPE_NAME, which Ray makes the label ray.io/node-group; `ray start` by hand does not. Or the report that
    the first generation of the autoscaler leaves in the control store names kinds of nodes.
    """
    if any(node.group for node in nodes):
        return True
    report = _internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS)
    return report is not None and manages_nodes(msgspec.json.decode(report).get("autoscaler_report") or {})


def manages_nodes(report: dict[str, Any]) -> bool:
    """Whether the report is of an autoscaler that starts nodes. One that only watches makes a kind of each node, named
    `node_` and its id."""
    kinds = set(report.get("active_nodes") or {}) | set(report.get("pending_launches") or {})
    pending = bool(report.get("pending_nodes") or report.get("failed_nodes"))
    known = {f"node_{node_id}" for node_id in report.get("node_type_mapping") or {}}
    return pending or not kinds <= known
