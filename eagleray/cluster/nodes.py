"""The nodes of the cluster, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagleray.errors import ClusterError

MIN_PREFIX = 8
"""So many digits of a node's id are enough to name it: the labels here have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    node_id: str
    """What a node is known by. Its IP is for connecting to it: two nodes may share one."""
    ip: str
    hostname: str = ""
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
        return f"{self.ip} ({self.node_id[:MIN_PREFIX]})"

    def is_meant(self, name: str) -> bool:
        """Whether `name` is its id, the beginning of that, its host name or its address."""
        by_id = len(name) >= MIN_PREFIX and self.node_id.startswith(name)
        return by_id or name in (self.node_id, self.ip) or (name != "" and name == self.hostname)


def only(nodes: Sequence[Node], names: Sequence[str]) -> list[Node]:
    """Those that `names` name; all of them, if there are no names. Raises `ClusterError` for a name of none."""
    for name in names:
        if not any(node.is_meant(name) for node in nodes):
            known = ", ".join(f"{node.label} {node.hostname}".rstrip() for node in nodes if node.is_alive)
            raise ClusterError(
                f"option `ray_nodes`: no node is {name!r}; give addresses, host names, or ids (8 digits or more) of "
                f"these: {known or 'none is alive'}"
            )
    return [node for node in nodes if not names or any(node.is_meant(name) for name in names)]


def address_of(node_id: str) -> str:
    """Return the IP of a node that is, or has been, in the cluster."""
    return next(node.ip for node in snapshot() if node.node_id == node_id)


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
            hostname=info.get("NodeManagerHostname", ""),
            is_alive=info["Alive"],
            total=info["Resources"],
            free=free.get(info["NodeID"], {}),
            group=info.get("Labels", {}).get("ray.io/node-group", ""),
            death=info.get("DeathReasonMessage", ""),
        )
        for info in sorted(infos, key=lambda info: str(info["NodeID"]))
    ]
