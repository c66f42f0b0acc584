"""What to say when engines find no room on the nodes of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eagleray.cluster.bundles import fitting, show
from eagleray.cluster.capacity import offer, sizes_within
from eagleray.cluster.engine_placement import EngineSize, Policy, place_engines
from eagleray.cluster.nodes import Node


@dataclass(frozen=True, slots=True)
class CapacityShortage:
    text: str
    may_pass: bool
    """The nodes have what is asked for, but others hold a part of it."""


def explain_engine_shortage(
    nodes: Sequence[Node], size: EngineSize, *, num_engines: int, policy: Policy, tensor: int, pipeline: int
) -> CapacityShortage:
    """Asked for, what each node has, how many engines fit on it, and which sizes would fit.

    `num_engines`: of the whole instance, those that run included; `tensor`, `pipeline`: parallel sizes of one engine.
    """
    alive = [node for node in nodes if node.is_alive]
    has = "; ".join(f"node {node.label} has {offer(node, size.bundle)}{_fits(node, size)}" for node in alive)
    asked = f"{_engines(num_engines)} of {_size(size)}{_terms(size, policy)}"
    most = _most(alive, size, num_engines, policy)
    if most == num_engines:
        text = f"{asked} were asked for and the cluster has room, but others hold a part of it: {has}"
        return CapacityShortage(text, may_pass=True)
    advice = [f"`data_parallel_size` {most}"] if most else []
    if size.num_bundles > 1:
        for t, p in sizes_within(tensor=tensor, pipeline=pipeline)[1:]:
            if _most(alive, replace(size, num_bundles=t * p, tensor=t), num_engines, policy) == num_engines:
                stages = f" with `pipeline_parallel_size` {p}" if pipeline > 1 else ""
                advice.append(f"`tensor_parallel_size` {t}{stages}")
                break
    would = " or ".join(advice) + " would fit" if advice else "nothing of that kind fits: set `ray_worker_resources`"
    would += "" if advice else " to what the nodes have, or add nodes"
    return CapacityShortage(f"the cluster cannot hold {asked}: {has or 'no node may be used'}; {would}", False)


def _most(nodes: Sequence[Node], size: EngineSize, num_engines: int, policy: Policy) -> int:
    """How many engines fit if nobody else holds anything."""
    empty = [replace(node, free=node.total) for node in nodes]
    return len(place_engines(empty, size, ranks=range(num_engines), policy=policy))


def _engines(count: int) -> str:
    return "an engine" if count == 1 else f"{count} engines"


def _size(size: EngineSize) -> str:
    return show(size.bundle) if size.num_bundles == 1 else f"{size.num_bundles} workers of {show(size.bundle)}"


def _terms(size: EngineSize, policy: Policy) -> str:
    terms = {"STRICT_PACK": ", each on one node (STRICT_PACK)", "STRICT_SPREAD": ", each worker on a node of its own"}
    return terms.get(size.strategy, "") + (", no two on a node (strict-spread)" if policy == "strict-spread" else "")


def _fits(node: Node, size: EngineSize) -> str:
    count = fitting(node.total, size.bundle) // size.num_bundles
    return f" (room for {_engines(count) if count else 'none'})" if size.strategy != "STRICT_SPREAD" else ""
