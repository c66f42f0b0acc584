"""Which expert is in which slot. Pure: measured load in, slots out, the same on every rank.

A slot is a place for one expert's weights; every rank has the same number of them, slot s being one of rank
s // slots_per_rank. There are at least as many slots as experts; what is left holds copies of experts with much load,
which is divided equally over the copies. Driven by `rebalance`.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eagleray.kernels.expert_slots import Slots

WORTHWHILE = 0.95
"""Experts are moved if the most loaded rank has at most this part of what it has now."""


class Move(NamedTuple):
    """The weights of `expert` are to be copied from the slot `source` to the slot `target`."""

    expert: int
    source: int
    target: int


def initial(num_experts: int, num_slots: int) -> Slots:
    """The experts in order, then a second copy of the first ones, and so on."""
    assert num_slots >= num_experts > 0, "every expert has a slot"
    return np.arange(num_slots, dtype=np.int64) % num_experts


def rank_loads(load: npt.ArrayLike, slots: Slots, num_ranks: int) -> npt.NDArray[np.float64]:
    """[num_ranks] of `load` [num_experts], if the copies of an expert share it equally."""
    shares = _shares(np.asarray(load, np.float64), np.bincount(slots, minlength=np.size(load)))
    return shares[slots].reshape(num_ranks, -1).sum(axis=1)


def balance(load: npt.ArrayLike, num_slots: int, num_ranks: int, previous: Slots) -> Slots:
    """Slots for experts of which each has had `load` [num_experts]; `previous`: where they are.

    Copies go where they take most load off; then the heaviest expert is put onto the rank with least load, again and
    again (the greedy rule of Graham, "Bounds on multiprocessing timing anomalies", 1969). Two copies of an expert are
    on one rank only if there are more slots than experts x ranks. What need not move stays, and all of it does if the
    most loaded rank would hardly gain.
    """
    weights = np.asarray(load, np.float64)
    num_experts, slots_per_rank = len(weights), num_slots // num_ranks
    assert num_slots == num_ranks * slots_per_rank == len(previous) >= num_experts
    copies = _copies(weights, num_slots, num_ranks)
    wanted = _assign(_shares(weights, copies), copies, num_ranks, slots_per_rank)
    slots = _settle(wanted, previous.reshape(num_ranks, slots_per_rank)).reshape(-1)
    before, after = rank_loads(weights, previous, num_ranks).max(), rank_loads(weights, slots, num_ranks).max()
    return slots if before > 0 and after <= WORTHWHILE * before else previous.copy()


def moves(old: Slots, new: Slots) -> list[Move]:
    """What must be copied, in order of the target. All sources are read before any target is written; the copies of an
    expert take turns as sources."""
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


def _shares(load: npt.NDArray[np.float64], copies: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return load / np.maximum(copies, 1)


def _copies(load: npt.NDArray[np.float64], num_slots: int, num_ranks: int) -> npt.NDArray[np.int64]:
    """How many slots each expert gets: the next one goes to the expert with most load for each copy. More copies than
    ranks help nobody, so they come last."""
    copies = np.ones(len(load), np.int64)
    for _ in range(num_slots - len(load)):
        open_to = copies < num_ranks
        open_to = open_to if open_to.any() else copies == copies.min()
        copies[np.where(open_to, load / copies, -1.0).argmax()] += 1
    return copies


def _assign(
    shares: npt.NDArray[np.float64], copies: npt.NDArray[np.int64], num_ranks: int, slots_per_rank: int
) -> list[list[int]]:
    """The experts of each rank, `slots_per_rank` each."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for expert in sorted(range(len(shares)), key=lambda expert: (-shares[expert], expert)):
        for _ in range(copies[expert]):
            free = [rank for rank in range(num_ranks) if len(ranks[rank]) < slots_per_rank]
            fresh = [rank for rank in free if expert not in ranks[rank]]
            rank = min(fresh or free, key=lambda rank: (loads[rank], rank))
            if not fresh:
                rank = _make_room(expert, ranks, loads, shares, free=rank)
            ranks[rank].append(expert)
            loads[rank] += shares[expert]
    return ranks


def _make_room(
    expert: int, ranks: list[list[int]], loads: list[float], shares: npt.NDArray[np.float64], *, free: int
) -> int:
    """Only ranks that have `expert` have a free slot: move something else from another rank to the rank `free`, and say
    where there is room now. If no slots are left over, that is possible: a rank without `expert` is full, so it has
    more experts than `free`, all different."""
    able = [
        rank for rank, experts in enumerate(ranks) if expert not in experts and not set(experts) <= set(ranks[free])
    ]
    if not able:
        return free
    rank = min(able, key=lambda rank: (loads[rank], rank))
    moved = min(set(ranks[rank]) - set(ranks[free]), key=lambda expert: (shares[expert], expert))
    ranks[rank].remove(moved)
    ranks[free].append(moved)
    loads[rank] -= shares[moved]
    loads[free] += shares[moved]
    return rank


def _settle(wanted: list[list[int]], previous: Slots) -> Slots:
    """[num_ranks, slots_per_rank] The same sets of experts, on ranks and in slots such that much of `previous` stays.
    Ranks are alike, so it does not matter which of them has which set."""
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
