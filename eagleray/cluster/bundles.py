"""Assignment of workers to the bundles of a placement group. Pure: values in, values out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from eagleray.errors import ClusterError, ConfigError, EagleRayError
from eagleray.messages.workers import RayCaller

Resources = Mapping[str, float]
Candidate = TypeVar("Candidate")

PRECISION = 1e-4
"""Ray counts resources in units of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    index: int
    node_id: str
    total: Resources
    free: Resources
    """Part of `total` that no actor holds."""


ChooseBundles = Callable[[Sequence[Bundle]], list[Bundle]]
"""Chooses the bundle of each worker, as `assign_bundles` and `bundles_at` do."""


class BundlesBusy(ClusterError):
    """The bundles are large enough, but others hold them. May pass."""


def worker_resources(asked: Resources, device: str, offered: Iterable[Resources]) -> dict[str, float]:
    """Return the resources of one worker: those asked for; else a GPU where GPUs are offered or wanted; else a CPU."""
    if asked:
        return dict(asked)
    if device == "cuda" or (device == "auto" and any(has.get("GPU", 0) > 0 for has in offered)):
        return {"GPU": 1.0}
    return {"CPU": 1.0}


def count_fitting(available: Resources, worker: Resources) -> int:
    """Return how many workers fit into `available`."""
    return min(int((available.get(name, 0.0) + PRECISION / 2) / amount) for name, amount in worker.items())


def held_in_group(resources: Resources, group_id: str) -> dict[int, dict[str, float]]:
    """Return the resources that a process holds of each bundle of the group, by index.

    `resources`: everything that the process holds, by Ray's names.
    """
    held: dict[int, dict[str, float]] = {}
    for name, amount in resources.items():
        match = re.fullmatch(rf"(.+)_group_(\d+)_{re.escape(group_id)}", name)
        if match is not None and match[1] != "bundle":  # every actor in the group holds a little of that
            held.setdefault(int(match[2]), {})[match[1]] = amount
    return held


def subtract_held(total: Resources, held: Resources) -> dict[str, float]:
    """Return the resources of a bundle that remain beside `held`."""
    return {name: amount - held.get(name, 0.0) for name, amount in total.items()}


def in_rank_order(bundles: Iterable[Bundle], engine_node: str) -> list[Bundle]:
    """Sort bundles: the engine's node first, then node by node (in order of their first bundle), then by index.

    So neighbours in rank are neighbours in the cluster, and rank 0 is on the engine's node if that has a bundle.
    """
    bundles = sorted(bundles, key=lambda bundle: bundle.index)
    first: dict[str, int] = {}
    for bundle in bundles:
        first.setdefault(bundle.node_id, bundle.index)
    return sorted(bundles, key=lambda b: (b.node_id != engine_node, first[b.node_id], b.index))


def keep_stages_together(
    candidates: Sequence[Candidate], *, node_of: Callable[[Candidate], str], stage_size: int, count: int
) -> list[Candidate]:
    """Choose `count` of `candidates`, each with room for one worker, so that the most stages of `stage_size`
    consecutive workers are on one node each. Nodes are taken in order of their first candidate.

    There must be enough candidates; `count` is a multiple of `stage_size`.
    """
    by_node: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_node.setdefault(node_of(candidate), []).append(candidate)
    chosen: list[Candidate] = []
    for free in by_node.values():
        num_whole = min(len(free) // stage_size, (count - len(chosen)) // stage_size) * stage_size
        chosen += free[:num_whole]
        del free[:num_whole]
    rest = [candidate for free in sorted(by_node.values(), key=len, reverse=True) for candidate in free]
    return chosen + rest[: count - len(chosen)]


def assign_bundles(
    bundles: Sequence[Bundle],
    *,
    worker: Resources,
    world_size: int,
    engine_node: str,
    tp_size: int = 1,
    indices: Sequence[int] = (),
) -> list[Bundle]:
    """Return the bundle of each rank. A bundle takes every worker that fits into it; `indices`, if given, are used
    exactly. The `tp_size` workers of a stage, which communicate in every layer, are on one node where possible.

    Raises `ConfigError` for wrong indices, `BundlesBusy` if others hold needed resources, `ClusterError` if the bundles
    are too few, too small or of the wrong kind.
    """
    if indices:
        _check_indices(indices, world_size)
        return bundles_at(bundles, indices, worker=worker)
    order = in_rank_order(bundles, engine_node)
    capacity = sum(count_fitting(bundle.total, worker) for bundle in order)
    if capacity < world_size:
        raise ClusterError(_explain_small_group(order, worker, world_size, capacity))
    candidates = [bundle for bundle in order for _ in range(count_fitting(bundle.free, worker))]
    if len(candidates) < world_size:
        held = ", ".join(f"{b.index} ({format_resources(b.free)} free of {format_resources(b.total)})" for b in order)
        raise BundlesBusy(
            f"the placement group has room for {capacity} workers of {format_resources(worker)}, but others hold a "
            f"part of it: {len(candidates)} of the {world_size} workers fit now; its bundles are {held}"
        )
    return keep_stages_together(candidates, node_of=lambda bundle: bundle.node_id, stage_size=tp_size, count=world_size)


def bundles_at(bundles: Sequence[Bundle], indices: Sequence[int], *, worker: Resources) -> list[Bundle]:
    """Return the bundles with these indices, one for each worker; several workers may share one.

    Raises `ConfigError` for a bundle that does not exist, `ClusterError` for one that is too small, `BundlesBusy` for
    one that others hold.
    """
    known = {bundle.index: bundle for bundle in bundles}
    workers = Counter(indices)
    for index, count in workers.items():
        if index not in known:
            raise ConfigError(
                f"option `bundle_indices`: there is no bundle {index}; the placement group has {len(known)}, counted "
                "from 0"
            )
        if count_fitting(known[index].total, worker) < count:
            raise ClusterError(
                f"bundle {index} of the placement group holds {format_resources(known[index].total)}, but "
                f"{_takes(count, worker)}: name another bundle, or set `ray_worker_resources`"
            )
    for index, count in workers.items():
        if count_fitting(known[index].free, worker) < count:
            raise BundlesBusy(
                f"bundle {index} of the placement group has {format_resources(known[index].free)} free of "
                f"{format_resources(known[index].total)}, but {_takes(count, worker)}: somebody else holds it"
            )
    return [known[index] for index in indices]


def check_caller_leaves_room(
    caller: RayCaller, bundles: Sequence[Bundle], choose: ChooseBundles, busy: BundlesBusy
) -> None:
    """Raise `ClusterError` if the workers would not fit even when all others had released the group: the caller waits
    for the engine, which would wait for the caller. `busy`: why they do not fit now."""
    unheld = [subtract_held(bundle.total, caller.held.get(bundle.index, {})) for bundle in bundles]
    rest = [replace(bundle, total=has, free=has) for bundle, has in zip(bundles, unheld, strict=True)]
    try:
        choose(rest)
    except EagleRayError:
        held = ", ".join(f"{format_resources(held)} of bundle {index}" for index, held in sorted(caller.held.items()))
        raise ClusterError(
            f"{busy}; {caller.name}, which asks for the engine, holds {held} itself, so waiting would not help: give "
            "that actor or task less (num_cpus, num_gpus, resources), add bundles to its group, or take executor "
            "in-process or processes, whose workers use what the program holds"
        ) from None


def _takes(count: int, worker: Resources) -> str:
    resources = format_resources(worker)
    return f"a worker takes {resources}" if count == 1 else f"{count} workers take {resources} each"


def _check_indices(indices: Sequence[int], world_size: int) -> None:
    if len(indices) != world_size:
        raise ConfigError(
            f"option `bundle_indices`: {len(indices)} were given, but there are {world_size} workers: give one for each"
        )
    if len(set(indices)) != len(indices):
        raise ConfigError(f"option `bundle_indices`: must be different, but they are {list(indices)}")


def _explain_small_group(bundles: Sequence[Bundle], worker: Resources, world_size: int, capacity: int) -> str:
    missing = [name for name in worker if not any(bundle.total.get(name, 0) > 0 for bundle in bundles)]
    if missing:
        return (
            f"no bundle of the placement group holds {missing[0]}, and a worker takes {format_resources(worker)}: set "
            f"`ray_worker_resources` to what the bundles hold ({format_bundles(bundles)})"
        )
    return (
        f"the placement group is too small: it has room for {capacity} of {world_size} workers of "
        f"{format_resources(worker)}; its bundles are {format_bundles(bundles)}"
    )


def format_resources(resources: Resources) -> str:
    """Format resources for messages: {CPU: 2, GPU: 0.5}."""
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in sorted(resources.items())) + "}"


def format_bundles(bundles: Iterable[Bundle]) -> str:
    """Format bundles for messages, in order of index: 0: {GPU: 1}, 1: {GPU: 1}."""
    return ", ".join(f"{b.index}: {format_resources(b.total)}" for b in sorted(bundles, key=lambda b: b.index))
