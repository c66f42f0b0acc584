"""Whether the cluster may get more nodes than it has.

Ray has no such question, so this collects what autoscalers leave behind. It shall not say no to a cluster that grows;
a yes about one that does not costs a wait until `ray_placement_timeout`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from ray._private import ray_constants, worker
from ray._raylet import (  # type: ignore[attr-defined]
    GCS_AUTOSCALER_STATE_NAMESPACE,
    GCS_AUTOSCALER_V2_ENABLED_KEY,
)
from ray.experimental.internal_kv import _internal_kv_get

from eagleray.cluster.nodes import Node

YOUNG_SECONDS = 8.0
"""How long the first report of an autoscaler is waited for, from the first question on: it writes one every 5 s."""


def can_grow(nodes: Sequence[Node]) -> bool | None:
    """Whether an autoscaler is at work; None if that is not known yet, because the cluster is a few seconds old.

    Any of three signs will do. A node of a named group: cluster launchers and KubeRay start nodes with
    RAY_NODE_TYPE_NAME, which Ray makes the label ray.io/node-group; `ray start` by hand does not. Or the control store
    says that the second generation of the autoscaler is in use, which somebody has asked for. Or the report that the
    first generation leaves there, from some seconds after the cluster's start on, names kinds of nodes.
    """
    if any(node.group for node in nodes) or _is_second_generation():
        return True
    status = _internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS)
    report = None if status is None else msgspec.json.decode(status).get("autoscaler_report")
    if report is not None:
        return manages_nodes(report)
    is_young = time.monotonic() < _first_asked() + YOUNG_SECONDS
    return None if is_young and not _is_own() else False


def _is_second_generation() -> bool:
    enabled = _internal_kv_get(
        GCS_AUTOSCALER_V2_ENABLED_KEY.encode(), namespace=GCS_AUTOSCALER_STATE_NAMESPACE.encode()
    )
    return bool(enabled == b"1")


def _is_own() -> bool:
    """Whether this process has started the cluster: then it is this host, and stays that."""
    node = worker._global_node
    return node is not None and bool(node.head)


@functools.cache
def _first_asked() -> float:
    return time.monotonic()


def manages_nodes(report: dict[str, Any]) -> bool:
    """Whether the report is of an autoscaler that starts nodes. One that only watches makes a kind of each node, named
    `node_` and its id."""
    kinds = set(report.get("active_nodes") or {}) | set(report.get("pending_launches") or {})
    pending = bool(report.get("pending_nodes") or report.get("failed_nodes"))
    known = {f"node_{node_id}" for node_id in report.get("node_type_mapping") or {}}
    return pending or not kinds <= known
