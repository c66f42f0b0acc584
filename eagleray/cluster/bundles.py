"""Which worker goes into which bundle of a placement group. Pure: values in, values out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from eagleray.errors import ClusterError, ConfigError, EagleRayError
from eagleray.messages.workers import RayCaller

Resources = Mapping[str, float]
Slot = TypeVar("Slot")

PRECISION = 1e-4
"""Ray counts resources in units of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    index: int
    node_id: str
    total: Resources
    free: Resources
    """What no other actor holds of it."""


Choose = Callable[[Sequence[Bundle]], list[Bundle]]
"""Assigns bundles to workers, as `assign` and `take` do."""


class BundlesBusy(ClusterError):
    """The bundles are large enough, but somebody else holds them. May pass."""


def worker_resources(asked: Resources, device: str, offered: Iterable[Resources]) -> dict[str, float]:
    """What one worker takes: what was `asked` for; else a GPU where GPUs are offered or wanted; else a CPU."""
    if asked:
        return dict(asked)
    if device == "cuda" or (device == "auto" and any(has.get("GPU", 0) > 0 for has in offered)):
        return {"GPU": 1.0}
    return {"CPU": 1.0}


def fitting(room: Resources, worker: Resources) -> int:
    """How many workers fit into `room`."""
    return min(int((room.get(name, 0.0) + PRECISION / 2) / amount) for name, amount in worker.items())


def held_in_group(resources: Resources, group_id: str) -> dict[int, dict[str, float]]:
    """Return the resources that a process holds of each bundle of the group, by index.

    `resources`: all that it holds, by Ray's names.
    """
    held: dict[int, dict[str, float]] = {}
    for name, amount in resources.items():
        match = re.fullmatch(rf"(.+)_group_(\d+)_{re.escape(group_id)}", name)
        if match is not None and match[1] != "bundle":  # every member of the group holds a little of that
            held.setdefault(int(match[2]), {})[match[1]] = amount
    return held


def less_held(total: Resources, held: Resources) -> dict[str, float]:
    """Return the resources of a bundle that are left beside those that are held."""
    return {name: amount - held.get(name, 0.0) for name, amount in total.items()}


def in_rank_order(bundles: Iterable[Bundle], engine_node: str) -> list[Bundle]:
    """The engine's node first, then node by node (in order of their first bundle), then by index.

    So neighbours in rank are neighbours in the cluster, and rank 0 is near the engine if it can be.
    """
    bundles = sorted(bundles, key=lambda bundle: bundle.index)
    first: dict[str, int] = {}
    for bundle in bundles:
        first.setdefault(bundle.node_id, bundle.index)
    return sorted(bundles, key=lambda b: (b.node_id != engine_node, first[b.node_id], b.index))


def keep_together(slots: Sequence[Slot], *, node_of: Callable[[Slot], str], group: int, count: int) -> list[Slot]:
    """Choose `count` of `slots`, each with room for one worker, so that as many as possible of the groups of `group`
    workers that follow one another are on one node each. Nodes are taken in order of their first slot.

    There must be enough slots; `count` is a multiple of `group`.
    """
    by_node: dict[str, list[Slot]] = {}
    for slot in slots:
        by_node.setdefault(node_of(slot), []).append(slot)
    chosen: list[Slot] = []
    for free in by_node.values():
        num_whole = min(len(free) // group, (count - len(chosen)) // group) * group
        chosen += free[:num_whole]
        del free[:num_whole]
    rest = [slot for free in sorted(by_node.values(), key=len, reverse=True) for slot in free]
    return chosen + rest[: count - len(chosen)]


def assign(
    bundles: Sequence[Bundle],
    *,
    worker: Resources,
    world_size: int,
    engine_node: str,
    tensor: int = 1,
    indices: Sequence[int] = (),
) -> list[Bundle]:
    """The bundle of each rank. A bundle takes as many workers as fit into it; `indices`, if given, are taken exactly.
    The `tensor` workers of a stage, which talk in every layer, are on one node where that is possible.

    Raises `ConfigError` for indices that make no sense, `BundlesBusy` if others hold what is needed, `ClusterError` if
    the bundles are too few, too small or of the wrong kind.
    """
    if indices:
        _check_indices(indices, world_size)
        return take(bundles, indices, worker=worker)
    order = in_rank_order(bundles, engine_node)
    room = sum(fitting(bundle.total, worker) for bundle in order)
    if room < world_size:
        raise ClusterError(_explain_room(order, worker, world_size, room))
    slots = [bundle for bundle in order for _ in range(fitting(bundle.free, worker))]
    if len(slots) < world_size:
        held = ", ".join(f"{b.index} ({show(b.free)} free of {show(b.total)})" for b in order)
        raise BundlesBusy(
            f"the placement group has room for {room} workers of {show(worker)}, but others hold a part of it: "
            f"{len(slots)} of the {world_size} workers fit now; its bundles are {held}"
        )
    return keep_together(slots, node_of=lambda bundle: bundle.node_id, group=tensor, count=world_size)


def take(bundles: Sequence[Bundle], indices: Sequence[int], *, worker: Resources) -> list[Bundle]:
    """The bundles of these indices, one for each worker; several workers may have the same one.

    Raises `ConfigError` for a bundle that is not there, `ClusterError` for one that is too small, `BundlesBusy` for one
    that others hold.
    """
    known = {bundle.index: bundle for bundle in bundles}
    workers = Counter(indices)
    for index, count in workers.items():
        if index not in known:
            raise ConfigError(
                f"option `bundle_indices`: there is no bundle {index}; the placement group has {len(known)}, counted "
                "from 0"
            )
        if fitting(known[index].total, worker) < count:
            raise ClusterError(
                f"bundle {index} of the placement group holds {show(known[index].total)}, but {_takes(count, worker)}: "
                "name another bundle, or set `ray_worker_resources`"
            )
    for index, count in workers.items():
        if fitting(known[index].free, worker) < count:
            raise BundlesBusy(
                f"bundle {index} of the placement group has {show(known[index].free)} free of "
                f"{show(known[index].total)}, but {_takes(count, worker)}: somebody else holds it"
            )
    return [known[index] for index in indices]


def check_caller_leaves_room(caller: RayCaller, bundles: Sequence[Bundle], choose: Choose, busy: BundlesBusy) -> None:
    """Raises `ClusterError` if the workers would not fit even when all others had let go of the group: the caller waits
    for the engine, which would wait for the caller. `busy`: why they do not fit now."""
    left = [less_held(bundle.total, caller.held.get(bundle.index, {})) for bundle in bundles]
    rest = [replace(bundle, total=has, free=has) for bundle, has in zip(bundles, left, strict=True)]
    try:
        choose(rest)
    except EagleRayError:
        held = ", ".join(f"{show(held)} of bundle {index}" for index, held in sorted(caller.held.items()))
        raise ClusterError(
            f"{busy}; {caller.name}, which asks for the engine, holds {held} itself, so waiting would not help: give "
            "that actor or task less (num_cpus, num_gpus, resources), add bundles to its group, or take executor "
            "in-process or processes, whose workers use what the program holds"
        ) from None


def _takes(count: int, worker: Resources) -> str:
    return f"a worker takes {show(worker)}" if count == 1 else f"{count} workers take {show(worker)} each"


def _check_indices(indices: Sequence[int], world_size: int) -> None:
    if len(indices) != world_size:
        raise ConfigError(
            f"option `bundle_indices`: {len(indices)} were given, but there are {world_size} workers: give one for each"
        )
    if len(set(indices)) != len(indices):
        raise ConfigError(f"option `bundle_indices`: must be different, but they are {list(indices)}")


def _explain_room(order: Sequence[Bundle], worker: Resources, world_size: int, room: int) -> str:
    bundles = ", ".join(f"{bundle.index}: {show(bundle.total)}" for bundle in sorted(order, key=lambda b: b.index))
    missing = [name for name in worker if not any(bundle.total.get(name, 0) > 0 for bundle in order)]
    if missing:
        return (
            f"no bundle of the placement group holds {missing[0]}, and a worker takes {show(worker)}: set "
            f"`ray_worker_resources` to what the bundles hold ({bundles})"
        )
    return (
        f"the placement group is too small: it has room for {room} of {world_size} workers of {show(worker)}; its "
        f"bundles are {bundles}"
    )


def show(resources: Resources) -> str:
    """For people: {CPU: 2, GPU: 0.5}."""
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in sorted(resources.items())) + "}"
