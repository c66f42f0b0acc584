"""What fits into the cluster, and what to say when it is not enough. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from eagleray.cluster.bundles import Resources, fitting, show
from eagleray.cluster.nodes import Node


def worker_capacity(nodes: Sequence[Node], worker: Resources, strategy: str, *, free: bool = False) -> int:
    """How many workers the nodes that are alive can hold at most, in all or of what is `free` now."""
    counts = [fitting(node.free if free else node.total, worker) for node in nodes if node.is_alive]
    match strategy:
        case "STRICT_PACK":
            return max(counts, default=0)
        case "STRICT_SPREAD":
            return sum(count > 0 for count in counts)
        case _:
            return sum(counts)


def largest_parallel(world: int, *, tensor: int, pipeline: int) -> tuple[int, int] | None:
    """The largest (tensor, pipeline) parallel sizes for `world` workers, each a divisor of what was asked for (other
    sizes rarely divide a model's heads); of equal ones the one with more tensor parallelism."""
    return next(
        (sizes for sizes in sizes_within(tensor=tensor, pipeline=pipeline) if sizes[0] * sizes[1] <= world), None
    )


def sizes_within(*, tensor: int, pipeline: int) -> list[tuple[int, int]]:
    """(tensor, pipeline) parallel sizes that are divisors of what was asked for, the largest first."""
    sizes = [(t, p) for t in _divisors(tensor) for p in _divisors(pipeline)]
    return sorted(sizes, key=lambda both: (both[0] * both[1], both[0]), reverse=True)


def explain_shortage(nodes: Sequence[Node], worker: Resources, strategy: str, *, tensor: int, pipeline: int) -> str:
    """Asked for, what each node has, what would fit."""
    world = tensor * pipeline
    alive = [node for node in nodes if node.is_alive]
    has = "; ".join(f"node {node.label} has {offer(node, worker)}" for node in alive)
    in_all, now = worker_capacity(nodes, worker, strategy), worker_capacity(nodes, worker, strategy, free=True)
    asked = f"{world} workers of {show(worker)}" if world > 1 else f"a worker of {show(worker)}"
    kind = f", each on a node of its own ({strategy})" if strategy == "STRICT_SPREAD" else ""
    kind = f", all on one node ({strategy})" if strategy == "STRICT_PACK" else kind
    if in_all >= world:
        return f"{asked}{kind} were asked for and the cluster has them, but others hold a part: {has}"
    fits = largest_parallel(min(in_all, now) or in_all, tensor=tensor, pipeline=pipeline)
    if fits is None:
        advice = "nothing of that kind fits: set `ray_worker_resources` to what the nodes have, or add nodes"
    elif pipeline == 1:
        advice = f"`tensor_parallel_size` {fits[0]} would fit"
    else:
        advice = f"`tensor_parallel_size` {fits[0]} with `pipeline_parallel_size` {fits[1]} would fit"
    return f"the cluster cannot hold {asked}{kind}: {has}; {advice}"


def offer(node: Node, worker: Resources) -> str:
    """What the node has of what a worker takes: CPU 1 free of 2."""
    return ", ".join(f"{name} {node.free.get(name, 0):g} free of {node.total.get(name, 0):g}" for name in worker)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
