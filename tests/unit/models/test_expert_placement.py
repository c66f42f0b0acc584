"""The placement of experts: every expert has an expert slot, the load is balanced, copies are apart, and experts move
only when needed."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eagleray.kernels.expert_slots import ABSENT
from eagleray.models.moe.expert_placement import (
    WORTHWHILE,
    balance,
    find_moves,
    find_sources,
    initial_slots,
    place_anew,
    rank_loads,
)

LOAD = st.integers(0, 5) | st.integers(0, 10**6)


@st.composite
def layers(draw):
    """Draw (load of each expert, number of expert slots, number of ranks)."""
    num_ranks = draw(st.integers(1, 6))
    loads = draw(st.lists(LOAD, min_size=1, max_size=24))
    fewest = -(-len(loads) // num_ranks)
    slots_per_rank = draw(st.integers(fewest, fewest + 4))
    return np.array(loads, np.int64), num_ranks * slots_per_rank, num_ranks


def by_rank(slots: np.ndarray, num_ranks: int) -> list[Counter]:
    return [Counter(part.tolist()) for part in slots.reshape(num_ranks, -1)]


def check(slots: np.ndarray, num_experts: int, num_slots: int, num_ranks: int) -> None:
    assert slots.shape == (num_slots,)
    assert set(slots.tolist()) == set(range(num_experts)), "every expert has an expert slot"
    if num_slots <= num_experts * num_ranks:
        assert all(max(experts.values()) == 1 for experts in by_rank(slots, num_ranks)), "no two copies on a rank"


@given(num_experts=st.integers(1, 300), more=st.integers(0, 300))
def test_initial_slots_experts_are_in_order(num_experts, more):
    slots = initial_slots(num_experts, num_experts + more)
    assert slots[:num_experts].tolist() == list(range(num_experts))
    copies = Counter(slots.tolist())
    assert len(copies) == num_experts
    assert max(copies.values()) - min(copies.values()) <= 1


@given(layer=layers(), seed=st.integers(0, 2**32 - 1))
def test_balance_any_placement_lowers_the_maximum_load(layer, seed):
    load, num_slots, num_ranks = layer
    previous = np.random.default_rng(seed).permutation(initial_slots(len(load), num_slots))
    slots = balance(load, num_slots, num_ranks, previous)
    before, after = (rank_loads(load, where, num_ranks).max() for where in (previous, slots))
    if np.array_equal(slots, previous):
        return
    check(slots, len(load), num_slots, num_ranks)
    assert after <= WORTHWHILE * before
    for old, new, old_experts, new_experts in zip(
        previous.reshape(num_ranks, -1),
        slots.reshape(num_ranks, -1),
        by_rank(previous, num_ranks),
        by_rank(slots, num_ranks),
        strict=True,
    ):
        assert (old == new).sum() == (old_experts & new_experts).total(), (
            "an expert that stays on a rank stays in its expert slot"
        )


@given(layer=layers())
def test_balance_same_load_again_moves_nothing(layer):
    load, num_slots, num_ranks = layer
    once = balance(load, num_slots, num_ranks, initial_slots(len(load), num_slots))
    assert np.array_equal(balance(load, num_slots, num_ranks, once), once)


def test_balance_hot_experts_are_separated_and_copied():
    load = np.array([90, 90, 1, 1, 1, 1, 1, 1])
    slots = balance(load, 8, 2, initial_slots(8, 8))
    assert sorted(rank_loads(load, slots, 2).tolist()) == [93, 93]
    slots = balance(np.array([100, 1, 1, 1]), 6, 2, initial_slots(4, 6))
    assert Counter(slots.tolist())[0] == 2
    assert sorted(rank_loads([100, 1, 1, 1], slots, 2).tolist()) in ([51, 52], [51.5, 51.5])


def test_balance_no_load_or_one_rank_moves_nothing():
    for load, num_ranks in (([0] * 6, 3), ([5, 900, 1, 1, 2, 3], 1)):
        before = initial_slots(6, 6)
        assert np.array_equal(balance(np.array(load), 6, num_ranks, before), before)


def test_balance_large_layer_halves_the_maximum_load():
    load = np.random.default_rng(0).zipf(1.5, 256).clip(max=10**6)
    previous = initial_slots(256, 320)
    slots = balance(load, 320, 32, previous)
    check(slots, 256, 320, 32)
    assert rank_loads(load, slots, 32).max() < 0.5 * rank_loads(load, previous, 32).max()


@given(layer=layers(), seed=st.integers(0, 2**32 - 1))
def test_find_moves_turn_old_into_new_slots(layer, seed):
    load, num_slots, _ = layer
    random = np.random.default_rng(seed)
    old, new = (random.permutation(initial_slots(len(load), num_slots)) for _ in range(2))
    after = old.copy()
    for move in find_moves(old, new):
        assert old[move.source] == move.expert
        assert old[move.target] != move.expert, "nothing is copied to where it is"
        after[move.target] = move.expert
    assert np.array_equal(after, new)
    assert find_moves(new, new) == []


def test_find_moves_copies_take_turns_as_sources():
    old, new = np.array([0, 1, 0, 2, 3, 4]), np.array([0, 1, 0, 0, 0, 4])
    assert [(move.source, move.target) for move in find_moves(old, new)] == [(0, 3), (2, 4)]


@given(st.data())
def test_place_anew_any_ranks_keeps_experts_in_place_and_fills_every_slot(data):
    num_experts, num_ranks = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    leaving = data.draw(st.sets(st.integers(0, num_ranks - 1), max_size=num_ranks - 1))
    num_staying = num_ranks - len(leaving)
    least = -(-num_experts // num_staying)
    per_rank = data.draw(st.integers(least, num_experts))
    width = data.draw(st.integers(1, num_experts))
    cell = st.integers(ABSENT, num_experts - 1)
    row = st.lists(cell, min_size=width, max_size=width, unique_by=lambda it: it if it != ABSENT else object())
    present = np.array(data.draw(st.lists(row, min_size=num_ranks, max_size=num_ranks)))
    load = np.array(data.draw(st.lists(st.integers(0, 100), min_size=num_experts, max_size=num_experts)))
    slots = place_anew(present, load, per_rank, leaving=leaving).reshape(num_ranks, per_rank)
    assert np.array_equal(slots, place_anew(present, load, per_rank, leaving=leaving).reshape(num_ranks, per_rank))
    staying = [rank for rank in range(num_ranks) if rank not in leaving]
    assert (slots[sorted(leaving)] == ABSENT).all()
    assert set(slots[staying].reshape(-1).tolist()) == set(range(num_experts))
    assert all(len(set(slots[rank].tolist())) == per_rank for rank in staying), "no rank has an expert twice"
    for rank in staying:
        for slot, expert in enumerate(present[rank, :per_rank]):
            copies = int((present[staying, :per_rank] == expert).sum())
            assert expert in (slots[rank, slot], ABSENT) or copies > 1

    moves, lost = find_sources(present, slots.reshape(-1))
    filled = np.full_like(slots, ABSENT)
    common = min(width, per_rank)
    filled[staying, :common] = present[staying, :common]
    flat = filled.reshape(-1)
    for move in moves:
        assert present.reshape(-1)[move.source] == move.expert
        flat[move.target] = move.expert
    for target in lost:
        assert slots.reshape(-1)[target] not in present
        flat[target] = slots.reshape(-1)[target]
    assert np.array_equal(filled, slots)


def test_place_anew_heavy_experts_are_spread_and_copied():
    present = np.array([[0, 1, 2, 3], [4, 5, 6, 7]])
    load = [0, 0, 10, 40, 0, 0, 10, 30]
    third = np.array([[0, 1, 2, 3], [4, 5, 6, 7], [ABSENT] * 4])
    assert place_anew(third, load, 3).tolist() == [0, 1, 2, 4, 5, 6, 3, 7, 2]
    assert place_anew(present, load, 8, leaving=(0,)).tolist() == [ABSENT] * 8 + [4, 5, 6, 7, 3, 2, 0, 1]
