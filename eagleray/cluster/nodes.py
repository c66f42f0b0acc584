"""The nodes of the cluster, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Node", "snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    node_id: str
    """What a node is known by. Its IP is for connecting to it: two nodes may share one."""
    ip: str
    is_alive: bool
    total: Mapping[str, float]
    free: Mapping[str, float]
    """What nobody holds now, as far as the control store has heard: some 100 ms old."""
    group: str = ""
    """The kind of node that an autoscaler or KubeRay started it as."""
    death: str = ""

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.ip} ({self.node_id[:8]})"


def snapshot() -> list[Node]:
    """Every node that has been in the cluster, in order of node id."""
    import ray
    from ray._private.state import available_resources_per_node

    infos = ray.nodes()  # type: ignore[no-untyped-call]
    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        Node(
            node_id=info["NodeID"],
            ip=info["NodeManagerAddress"],
            is_alive=info["Alive"],
            total=info["Resources"],
            free=free.get(info["NodeID"], {}),
            group=info.get("Labels", {}).get("ray.io/node-group", ""),
            death=info.get("DeathReasonMessage", ""),
        )
        for info in sorted(infos, key=lambda info: str(info["NodeID"]))
    ]
