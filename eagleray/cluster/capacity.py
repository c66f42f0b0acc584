"""Capacity of the cluster, and the sentences that explain a shortage. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eagleray.cluster.bundles import Resources, count_fitting, format_resources
from eagleray.cluster.engine_placement import EngineSize, Policy, place_engines
from eagleray.cluster.nodes import Node


@dataclass(frozen=True, slots=True)
class CapacityShortage:
    text: str
    may_pass: bool
    """Whether the nodes have the resources, but others hold a part of them."""


def worker_capacity(nodes: Sequence[Node], worker: Resources, strategy: str, *, free: bool = False) -> int:
    """Return how many workers the living nodes can hold at most, counting all resources or only those `free` now."""
    counts = [count_fitting(node.free if free else node.total, worker) for node in nodes if node.is_alive]
    match strategy:
        case "STRICT_PACK":
            return max(counts, default=0)
        case "STRICT_SPREAD":
            return sum(count > 0 for count in counts)
        case _:
            return sum(counts)


def largest_parallel(world: int, *, tensor: int, pipeline: int) -> tuple[int, int] | None:
    """Return the largest (tensor, pipeline) parallel sizes for `world` workers, or None if no worker fits.

    Each is a divisor of the size asked for, because other sizes rarely divide a model's heads. Of equal products the
    one with more tensor parallelism is returned.
    """
    return next(
        (sizes for sizes in _smaller_sizes(tensor=tensor, pipeline=pipeline) if sizes[0] * sizes[1] <= world), None
    )


def explain_shortage(nodes: Sequence[Node], size: EngineSize, *, tensor: int, pipeline: int) -> CapacityShortage:
    """Explain a shortage: the workers asked for, the resources of each node, and parallel sizes that would fit."""
    world, worker, strategy = tensor * pipeline, size.bundle, size.strategy
    alive = [node for node in nodes if node.is_alive]
    has = "; ".join(f"node {node.label} has {_offer(node, worker)}" for node in alive)
    in_all, now = worker_capacity(nodes, worker, strategy), worker_capacity(nodes, worker, strategy, free=True)
    asked = f"{world} workers of {format_resources(worker)}" if world > 1 else f"a worker of {format_resources(worker)}"
    kind = f", each on a node of its own ({strategy})" if strategy == "STRICT_SPREAD" else ""
    kind = f", all on one node ({strategy})" if strategy == "STRICT_PACK" else kind
    if in_all >= world:
        text = f"{asked}{kind} were asked for and the cluster has them, but others hold a part: {has}"
        return CapacityShortage(text, may_pass=True)
    fits = largest_parallel(min(in_all, now) or in_all, tensor=tensor, pipeline=pipeline)
    if fits is None:
        advice = "nothing of that kind fits: set `ray_worker_resources` to what the nodes have, or add nodes"
    elif pipeline == 1:
        advice = f"`tensor_parallel_size` {fits[0]} would fit"
    else:
        advice = f"`tensor_parallel_size` {fits[0]} with `pipeline_parallel_size` {fits[1]} would fit"
    return CapacityShortage(f"the cluster cannot hold {asked}{kind}: {has}; {advice}", may_pass=False)


def explain_engine_shortage(
    nodes: Sequence[Node], size: EngineSize, *, num_engines: int, policy: Policy, tensor: int, pipeline: int
) -> CapacityShortage:
    """Explain a shortage: the engines asked for, each node's resources and room for engines, and sizes that would fit.

    `num_engines` counts all engines of the instance, including running ones; `tensor` and `pipeline` are the
    parallel sizes of one engine.
    """
    alive = [node for node in nodes if node.is_alive]
    has = "; ".join(f"node {node.label} has {_offer(node, size.bundle)}{_fits(node, size)}" for node in alive)
    asked = f"{_engines(num_engines)} of {_size(size)}{_terms(size, policy)}"
    most = _most_engines(alive, size, num_engines, policy)
    if most == num_engines:
        text = f"{asked} were asked for and the cluster has room, but others hold a part of it: {has}"
        return CapacityShortage(text, may_pass=True)
    advice = [f"`data_parallel_size` {most}"] if most else []
    if size.num_bundles > 1:
        for t, p in _smaller_sizes(tensor=tensor, pipeline=pipeline)[1:]:
            smaller = replace(size, num_bundles=t * p, tp_size=t)
            if _most_engines(alive, smaller, num_engines, policy) == num_engines:
                stages = f" with `pipeline_parallel_size` {p}" if pipeline > 1 else ""
                advice.append(f"`tensor_parallel_size` {t}{stages}")
                break
    would = " or ".join(advice) + " would fit" if advice else "nothing of that kind fits: set `ray_worker_resources`"
    would += "" if advice else " to what the nodes have, or add nodes"
    return CapacityShortage(f"the cluster cannot hold {asked}: {has or 'no node may be used'}; {would}", False)


def _smaller_sizes(*, tensor: int, pipeline: int) -> list[tuple[int, int]]:
    """Return the (tensor, pipeline) parallel sizes that are divisors of those asked for, the largest first."""
    sizes = [(t, p) for t in _divisors(tensor) for p in _divisors(pipeline)]
    return sorted(sizes, key=lambda both: (both[0] * both[1], both[0]), reverse=True)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _offer(node: Node, worker: Resources) -> str:
    """Format the node's part of the resources that a worker takes: CPU 1 free of 2."""
    return ", ".join(f"{name} {node.free.get(name, 0):g} free of {node.total.get(name, 0):g}" for name in worker)


def _most_engines(nodes: Sequence[Node], size: EngineSize, num_engines: int, policy: Policy) -> int:
    """Return how many engines fit if nothing on the nodes is held."""
    empty = [replace(node, free=node.total) for node in nodes]
    return len(place_engines(empty, size, ranks=range(num_engines), policy=policy))


def _engines(count: int) -> str:
    return "an engine" if count == 1 else f"{count} engines"


def _size(size: EngineSize) -> str:
    bundle = format_resources(size.bundle)
    return bundle if size.num_bundles == 1 else f"{size.num_bundles} workers of {bundle}"


def _terms(size: EngineSize, policy: Policy) -> str:
    terms = {"STRICT_PACK": ", each on one node (STRICT_PACK)", "STRICT_SPREAD": ", each worker on a node of its own"}
    return terms.get(size.strategy, "") + (", no two on a node (strict-spread)" if policy == "strict-spread" else "")


def _fits(node: Node, size: EngineSize) -> str:
    count = count_fitting(node.total, size.bundle) // size.num_bundles
    return f" (room for {_engines(count) if count else 'none'})" if size.strategy != "STRICT_SPREAD" else ""
