"""Placement groups of the cluster: find, create, inspect and remove them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from ray._raylet import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from eagleray.cluster.bundles import Bundle, Resources
from eagleray.cluster.nodes import Node
from eagleray.cluster.timeouts import REMOVE_GROUP_SECONDS
from eagleray.errors import ClusterError, EagleRayError

Table = dict[str, Any]


def create(name: str, bundle: Resources, count: int, strategy: str, *, nodes: Sequence[str] | None = None) -> str:
    """Ask for a new group of `count` times `bundle`, and return its id.

    `nodes`: id of the node that each bundle must be on; None: any.
    """
    selector = None if nodes is None else [{"ray.io/node-id": node} for node in nodes]
    group = placement_group([dict(bundle)] * count, strategy=strategy, name=name, bundle_label_selector=selector)
    return str(group.id.hex())


def find(wanted: str) -> str:
    """Return the id of the group with this id or name. Names are looked up in every namespace, because the program
    that made the group does not know ours. Raises `ClusterError` for no group, several, or one that was removed."""
    table = _table()
    if wanted in table:
        if table[wanted]["state"] == "REMOVED":
            raise ClusterError(f"placement group {wanted} was removed already")
        return wanted
    named = {group_id: entry["state"] for group_id, entry in table.items() if entry["name"] == wanted}
    existing = [group_id for group_id, state in named.items() if state != "REMOVED"]
    if len(existing) == 1:
        return existing[0]
    if existing:
        raise ClusterError(
            f"{len(existing)} placement groups are named {wanted!r}: give the id of one: {', '.join(existing)}"
        )
    if named:
        raise ClusterError(f"placement group {wanted!r} was removed already")
    known = ", ".join(sorted(e["name"] or group_id for group_id, e in table.items() if e["state"] != "REMOVED"))
    raise ClusterError(f"there is no placement group {wanted!r}; the cluster has {known or 'none'}")


def is_ready(group_id: str) -> bool:
    """Whether all its bundles are on nodes. Raises `ClusterError` if it was removed."""
    state = _entry(group_id)["state"]
    if state == "REMOVED":
        raise ClusterError(f"placement group {group_id} was removed")
    return bool(state == "CREATED")


def pending_reason(group_id: str) -> str:
    """Return Ray's reason why a group is not ready."""
    return str(_entry(group_id)["stats"]["scheduling_state"]).lower().replace("_", " ")


def are_on_living_nodes(bundles: Iterable[Bundle], nodes: Sequence[Node]) -> bool:
    """Whether no bundle was lost with its node. Ray looks for another node for a lost one."""
    living = {node.node_id for node in nodes if node.is_alive}
    return all(bundle.node_id in living for bundle in bundles)


def have_nodes(group_id: str, indices: Iterable[int]) -> bool:
    """Whether these bundles of a group that was ready are still on nodes, according to the control store."""
    nodes = _entry(group_id)["bundles_to_node_id"]
    return all(nodes.get(index) for index in indices)


def bundles_of(group_id: str, nodes: Sequence[Node]) -> list[Bundle]:
    """Return the bundles of a group that is ready, with their free resources."""
    entry = _entry(group_id)
    free = {node.node_id: node.free for node in nodes}
    return [
        Bundle(
            index=index,
            node_id=entry["bundles_to_node_id"][index],
            total=total,
            free={
                name: free.get(entry["bundles_to_node_id"][index], {}).get(f"{name}_group_{index}_{group_id}", 0.0)
                for name in total
            },
        )
        for index, total in sorted(entry["bundles"].items())
    ]


def remove(group_id: str) -> None:
    """Remove the group and wait until Ray reports it removed; Ray kills its actors. Idempotent."""
    remove_placement_group(handle(group_id))
    deadline = time.monotonic() + REMOVE_GROUP_SECONDS
    while _table().get(group_id, {"state": "REMOVED"})["state"] != "REMOVED":
        if time.monotonic() >= deadline:
            raise EagleRayError(f"placement group {group_id} was not removed within {REMOVE_GROUP_SECONDS:.0f} s")
        time.sleep(0.02)


def handle(group_id: str) -> PlacementGroup:
    """Return the handle with which Ray is told to put an actor into the group."""
    return PlacementGroup(PlacementGroupID(bytes.fromhex(group_id)))


def _table() -> dict[str, Table]:
    table: dict[str, Table] = placement_group_table()
    return table


def _entry(group_id: str) -> Table:
    entry = _table().get(group_id)
    if entry is None:
        raise ClusterError(f"there is no placement group {group_id}")
    return entry
