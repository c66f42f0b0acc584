"""The choice of an expert for every expert slot. Pure: it maps measured load to slots, with the same result on every
rank.

An expert slot is a place for one expert's weights. Every rank has the same number of them; expert slot s is one of rank
s // slots_per_rank. Every expert has at least one; the others hold copies of experts with much load, which is divided
equally over the copies. When the group has other ranks than before, the experts are placed anew: they stay where they
are if there is room, and ranks that are about to leave the group keep none. Driven by `rebalance`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eagleray.kernels.expert_slots import ABSENT, Slots

WORTHWHILE = 0.95
"""Experts are moved only if the load of the most loaded rank falls at least to this fraction of its current value."""


class Move(NamedTuple):
    """A copy of the weights of `expert` from the expert slot `source` to the expert slot `target`."""

    expert: int
    source: int
    target: int


def initial_slots(num_experts: int, num_slots: int) -> Slots:
    """Return the experts in order, then a second copy of the first ones, and so on."""
    assert num_slots >= num_experts > 0, "every expert has an expert slot"
    return np.arange(num_slots, dtype=np.int64) % num_experts


def rank_loads(load: npt.ArrayLike, slots: Slots, num_ranks: int) -> npt.NDArray[np.float64]:
    """Return the load of each rank, [num_ranks], if the copies of an expert divide its `load` [num_experts] equally."""
    per_copy = _load_per_copy(np.asarray(load, np.float64), np.bincount(slots, minlength=np.size(load)))
    return per_copy[slots].reshape(num_ranks, -1).sum(axis=1)


def balance(load: npt.ArrayLike, num_slots: int, num_ranks: int, previous: Slots) -> Slots:
    """Return new expert slots for experts that had `load` [num_experts] tokens each and are in the slots `previous`.

    First, copies are made of the experts whose copies have the most load each. Then the heaviest copy is put onto the
    rank with the least load, again and again (the greedy rule of Graham, "Bounds on multiprocessing timing anomalies",
    1969). Two copies of an expert are on one rank only if there are more slots than experts x ranks. Experts that need
    not move stay in their slots, and all of them stay if the most loaded rank would hardly gain.
    """
    weights = np.asarray(load, np.float64)
    num_experts, slots_per_rank = len(weights), num_slots // num_ranks
    assert num_slots == num_ranks * slots_per_rank == len(previous) >= num_experts
    copies = _copies(weights, num_slots, num_ranks)
    wanted = _assign(_load_per_copy(weights, copies), copies, num_ranks, slots_per_rank)
    slots = _keep_in_place(wanted, previous.reshape(num_ranks, slots_per_rank)).reshape(-1)
    before, after = rank_loads(weights, previous, num_ranks).max(), rank_loads(weights, slots, num_ranks).max()
    return slots if before > 0 and after <= WORTHWHILE * before else previous.copy()


def find_moves(old: Slots, new: Slots) -> list[Move]:
    """Return the copies that turn `old` into `new`, in order of the target. All sources must be read before any target
    is written. The copies of an expert take turns as sources."""
    sources: dict[int, list[int]] = {}
    for slot, expert in enumerate(old.tolist()):
        sources.setdefault(expert, []).append(slot)
    needed = []
    for target in np.flatnonzero(old != new).tolist():
        expert = int(new[target])
        copies = sources[expert]
        needed.append(Move(expert, copies[0], target))
        copies.append(copies.pop(0))
    return needed


def place_anew(present: Slots, load: npt.ArrayLike, slots_per_rank: int, *, leaving: Collection[int] = ()) -> Slots:
    """Return expert slots [num_ranks x slots_per_rank] for ranks that have the experts `present` [num_ranks, any], -1
    for an empty slot. `load` [num_experts] is that of the experts so far. Ranks in `leaving` get no experts.

    Experts stay in the slots that their rank keeps. Those that are in no slot then come into the empty slots, the
    heaviest first, each onto the rank with the least load; without empty slots they replace copies. Slots that are
    still empty get copies of the experts with the most load per copy.
    """
    weights = np.asarray(load, np.float64)
    num_ranks, num_experts = len(present), len(weights)
    slots = np.full((num_ranks, slots_per_rank), ABSENT)
    kept = present[:, :slots_per_rank]
    slots[:, : kept.shape[1]] = kept
    stays = np.array([rank not in leaving for rank in range(num_ranks)])
    slots[~stays] = ABSENT
    copies = np.bincount(slots[slots != ABSENT], minlength=num_experts)
    missing = [int(expert) for expert in np.argsort(-weights, kind="stable") if copies[expert] == 0]
    _make_slots_free(slots, copies, len(missing) - int((slots[stays] == ABSENT).sum()))

    def put(expert: int, rank: int) -> None:
        slots[rank, slots[rank].tolist().index(ABSENT)] = expert
        copies[expert] += 1

    def find_room() -> int | None:
        """Return the rank with the least load among those with empty slots, or None."""
        is_empty = slots == ABSENT
        loads = np.where(is_empty, 0.0, _load_per_copy(weights, copies)[slots]).sum(axis=1)
        num_empty = is_empty.sum(axis=1)
        able = np.flatnonzero(stays & (num_empty > 0)).tolist()
        return min(able, key=lambda rank: (loads[rank], -num_empty[rank], rank), default=None)

    for expert in missing:
        rank = find_room()
        assert rank is not None, "every expert has a slot"
        put(expert, rank)
    while (rank := find_room()) is not None:
        others = set(range(num_experts)).difference(slots[rank].tolist())
        assert others, "a rank has no more slots than there are experts"
        put(max(others, key=lambda it: (weights[it] / copies[it], -copies[it], -it)), rank)
    return slots.reshape(-1)


def find_sources(present: Slots, slots: Slots) -> tuple[list[Move], list[int]]:
    """Return the copies that fill `slots` [num_ranks x slots_per_rank] of ranks that have the experts `present`
    [num_ranks, width], and the slots whose experts no rank has. A source counts `width` slots for each rank. A rank
    that has the expert itself is its own source, else the ranks that have it take turns."""
    width, slots_per_rank = present.shape[1], len(slots) // len(present)
    sources: dict[int, list[int]] = {}
    for source, expert in enumerate(present.reshape(-1).tolist()):
        sources.setdefault(expert, []).append(source)
    moves: list[Move] = []
    lost: list[int] = []
    for target, expert in enumerate(slots.tolist()):
        rank, slot = divmod(target, slots_per_rank)
        if expert == ABSENT or (slot < width and present[rank, slot] == expert):
            continue
        if not (copies := sources.get(expert)):
            lost.append(target)
            continue
        own = [source for source in copies if source // width == rank]
        moves.append(Move(expert, (own or copies)[0], target))
        copies.append(copies.pop(0))
    return moves, lost


def _make_slots_free(slots: Slots, copies: npt.NDArray[np.int64], count: int) -> None:
    """Empty `count` slots whose experts have other copies, beginning with the last."""
    flat = slots.reshape(-1)  # a view
    for slot in reversed(range(len(flat))):
        if count > 0 and flat[slot] != ABSENT and copies[flat[slot]] > 1:
            copies[flat[slot]] -= 1
            flat[slot] = ABSENT
            count -= 1
    assert count <= 0, "there are no fewer slots than experts"


def _load_per_copy(load: npt.NDArray[np.float64], copies: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return load / np.maximum(copies, 1)


def _copies(load: npt.NDArray[np.float64], num_slots: int, num_ranks: int) -> npt.NDArray[np.int64]:
    """Return the number of expert slots for each expert: the next slot goes to the expert with the most load per copy.
    More copies than ranks do not help, so they come last."""
    copies = np.ones(len(load), np.int64)
    for _ in range(num_slots - len(load)):
        can_gain = copies < num_ranks
        can_gain = can_gain if can_gain.any() else copies == copies.min()
        copies[np.where(can_gain, load / copies, -1.0).argmax()] += 1
    return copies


def _assign(
    per_copy: npt.NDArray[np.float64], copies: npt.NDArray[np.int64], num_ranks: int, slots_per_rank: int
) -> list[list[int]]:
    """Return the experts of each rank, `slots_per_rank` each."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for expert in sorted(range(len(per_copy)), key=lambda expert: (-per_copy[expert], expert)):
        for _ in range(copies[expert]):
            free = [rank for rank in range(num_ranks) if len(ranks[rank]) < slots_per_rank]
            fresh = [rank for rank in free if expert not in ranks[rank]]
            rank = min(fresh or free, key=lambda rank: (loads[rank], rank))
            if not fresh:
                rank = _make_room(expert, ranks, loads, per_copy, free=rank)
            ranks[rank].append(expert)
            loads[rank] += per_copy[expert]
    return ranks


def _make_room(
    expert: int, ranks: list[list[int]], loads: list[float], per_copy: npt.NDArray[np.float64], *, free: int
) -> int:
    """Move an expert from a rank without `expert` to the rank `free`, and return the rank that has room now. Called
    when all ranks with a free slot have `expert` already. Unless there are more slots than experts x ranks, this is
    possible: a rank without `expert` is full, so it has more experts than `free`, all different."""
    able = [
        rank for rank, experts in enumerate(ranks) if expert not in experts and not set(experts) <= set(ranks[free])
    ]
    if not able:
        return free
    rank = min(able, key=lambda rank: (loads[rank], rank))
    moved = min(set(ranks[rank]) - set(ranks[free]), key=lambda expert: (per_copy[expert], expert))
    ranks[rank].remove(moved)
    ranks[free].append(moved)
    loads[rank] -= per_copy[moved]
    loads[free] += per_copy[moved]
    return rank


def _keep_in_place(wanted: list[list[int]], previous: Slots) -> Slots:
    """Return expert slots [num_ranks, slots_per_rank] with the same sets of experts, on ranks and in slots such that
    much of `previous` stays. Ranks are alike, so it does not matter which of them has which set."""
    size = len(previous)
    kept = [[_num_common(experts, old) for old in previous.tolist()] for experts in wanted]
    slots = np.full_like(previous, -1)
    sets, ranks = set(range(size)), set(range(size))
    for number, rank in sorted(product(sets, ranks), key=lambda pair: (-kept[pair[0]][pair[1]], pair)):
        if number in sets and rank in ranks:
            sets.remove(number)
            ranks.remove(rank)
            left = list(wanted[number])
            for slot, expert in enumerate(previous[rank].tolist()):
                if expert in left:
                    slots[rank, slot] = expert
                    left.remove(expert)
            slots[rank, slots[rank] < 0] = left
    return slots


def _num_common(some: list[int], others: list[int]) -> int:
    return (Counter(some) & Counter(others)).total()
