"""Tokens and experts on different ranks give the result of one rank with all experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import together

from eagleray.kernels.expert_slots import LayerExpertSlots
from eagleray.models.moe.token_dispatcher import (
    AllGatherTokenDispatcher,
    AllToAllTokenDispatcher,
    local_slots,
    pack_rows,
    plan_routes,
    unpack_rows,
)
from eagleray.parallel.group import SingleRankGroup
from eagleray.parallel.shared_memory import Segment

HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 7, 3
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=[1, 2, 3])
def groups(request):
    size = request.param
    if size == 1:
        made = [SingleRankGroup()]
    else:
        segment = Segment.create(size, buffer_bytes=4096)
        others = [Segment.attach(segment.handle, rank=rank, num_ranks=size, timeout=20) for rank in range(1, size)]
        made = [segment.join(timeout=20), *others]
    yield made
    for group in made:
        group.close()


@dataclass
class Experts:
    """Products of one token at a time, so that their bits cannot depend on other tokens."""

    slots: list[int]
    """The expert in each of this rank's expert slots."""
    dtype: torch.dtype

    def pairs(self, x, slots):
        assert (slots.dtype, x.dtype, len(x)) == (torch.int32, self.dtype, len(slots))
        out = torch.zeros(*slots.shape, HIDDEN)
        for row, place in (slots >= 0).nonzero().tolist():
            out[row, place] = self.compute(x[row], self.slots[slots[row, place]])
        return out

    def sums(self, x, slots, weights):
        return self.weighted_sum(self.pairs(x, slots), weights)

    def weighted_sum(self, outputs, weights):
        assert weights.dtype == torch.float32
        total = torch.zeros(len(outputs), HIDDEN)
        for place in range(weights.shape[1]):
            total += weights[:, place, None] * outputs[:, place]
        return total

    def compute(self, row, expert):
        generator = torch.Generator().manual_seed(expert)
        gate, up = torch.randn(2, INNER, HIDDEN, generator=generator).to(self.dtype)
        down = torch.randn(HIDDEN, INNER, generator=generator).to(self.dtype)
        return (down @ (F.silu(gate @ row) * (up @ row))).float()


def make_placement(experts: list[int], num_ranks: int) -> LayerExpertSlots:
    return LayerExpertSlots(np.array(experts), num_experts=EXPERTS, rank=0, num_ranks=num_ranks)


@st.composite
def placements(draw, num_ranks: int):
    """Draw the expert in each expert slot, in any order, some more than once."""
    num_slots = -(-EXPERTS // num_ranks) * num_ranks + num_ranks * draw(st.integers(0, 2))
    more = draw(st.lists(st.integers(0, EXPERTS - 1), min_size=num_slots - EXPERTS, max_size=num_slots - EXPERTS))
    return draw(st.permutations([*range(EXPERTS), *more]))


def make_rows(count: int, dtype: torch.dtype, seed: int):
    """Return (x, ids, weights) of a rank."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    chosen = torch.rand(count, EXPERTS, generator=generator).topk(TOP_K)
    return x, chosen.indices, chosen.values.softmax(-1).to(dtype)


def run(groups, kind, experts, counts, dtype, seed):
    placement = make_placement(experts, len(groups))
    size = placement.slots_per_rank

    def work(group):
        own = Experts(list(experts[group.rank * size : (group.rank + 1) * size]), dtype)
        return kind(group)(*make_rows(counts[group.rank], dtype, seed + group.rank), own, placement, counts)

    return together([partial(work, group) for group in groups])


def expected(rank, counts, dtype, seed):
    x, ids, weights = make_rows(counts[rank], dtype, seed + rank)
    whole = Experts(list(range(EXPERTS)), dtype)
    return whole.sums(x, ids.int(), weights.float())


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_all_to_all_any_placement_has_the_bits_of_one_rank(groups, dtype, data, seed):
    counts = data.draw(st.lists(st.integers(0, 5), min_size=len(groups), max_size=len(groups)))
    experts = data.draw(placements(len(groups)))
    for rank, result in enumerate(run(groups, AllToAllTokenDispatcher, experts, counts, dtype, seed)):
        assert (result.shape, result.dtype) == ((counts[rank], HIDDEN), torch.float32)
        assert torch.equal(result, expected(rank, counts, dtype, seed))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_all_gather_any_placement_equals_one_rank(groups, dtype, data, seed):
    counts = data.draw(st.lists(st.integers(0, 5), min_size=len(groups), max_size=len(groups)))
    experts = data.draw(placements(len(groups)))
    for rank, result in enumerate(run(groups, AllGatherTokenDispatcher, experts, counts, dtype, seed)):
        assert (result.shape, result.dtype) == ((counts[rank], HIDDEN), torch.float32)
        torch.testing.assert_close(result, expected(rank, counts, dtype, seed), atol=1e-5, rtol=1e-5)


def test_all_to_all_sends_tokens_only_to_their_experts():
    """All-to-all sends a token once to each other rank that has one of its experts, and an output for each pair."""
    segment = Segment.create(2)
    groups = [segment.join(timeout=20), Segment.attach(segment.handle, rank=1, num_ranks=2, timeout=20)]
    placement = make_placement([0, 1, 2, 3, 4, 5, 6, 0], 2)
    x = torch.randn(3, HIDDEN)
    ids = torch.tensor([[1, 2, 3], [4, 1, 5], [4, 5, 6]])

    def work(group):
        mine = slice(0, 3 if group.rank == 0 else 0)
        own = Experts([[0, 1, 2, 3], [4, 5, 6, 0]][group.rank], torch.float32)
        AllToAllTokenDispatcher(group)(x[mine], ids[mine], torch.ones(3, 3)[mine], own, placement, [3, 0])
        return group.bytes_sent["all_to_all"]

    row, output = 4 * HIDDEN + 4 * 3, 4 * HIDDEN
    assert together([partial(work, group) for group in groups]) == [2 * row, 5 * output]
    for group in groups:
        group.close()


@given(data=st.data(), num_ranks=st.integers(1, 4), first=st.integers(0, 9), count=st.integers(0, 6))
def test_find_slots_copies_take_turns_over_all_tokens(data, num_ranks, first, count):
    experts = data.draw(placements(num_ranks))
    placement = make_placement(experts, num_ranks)
    ids = make_rows(count, torch.float32, first)[1]
    slots = placement.global_map.find(ids, first_row=first)
    assert slots.shape == ids.shape
    for row in range(count):
        for place in range(TOP_K):
            expert = int(ids[row, place])
            copies = [slot for slot, other in enumerate(experts) if other == expert]
            assert slots[row, place] == copies[(first + row) % len(copies)]
    for rank in range(num_ranks):
        own = local_slots(slots, rank, placement.slots_per_rank)
        assert own.dtype == torch.int32
        begin = rank * placement.slots_per_rank
        here = (slots >= begin) & (slots < begin + placement.slots_per_rank)
        assert torch.equal(own, torch.where(here, slots - begin, -1).int())


@given(ranks=st.lists(st.lists(st.integers(0, 3), min_size=TOP_K, max_size=TOP_K), max_size=8))
def test_plan_routes_lists_tokens_once_per_rank_and_pairs_once(ranks):
    routes = plan_routes(torch.tensor(ranks, dtype=torch.int32).reshape(-1, TOP_K), 4)
    rows = [[row for row, to in enumerate(ranks) if rank in to] for rank in range(4)]
    pairs = [
        [row * TOP_K + place for row, to in enumerate(ranks) for place in range(TOP_K) if to[place] == rank]
        for rank in range(4)
    ]
    assert routes.tokens.tolist() == [row for part in rows for row in part]
    assert routes.ranks.tolist() == [rank for rank, part in enumerate(rows) for _ in part]
    assert routes.token_counts == [len(part) for part in rows]
    assert routes.pairs.tolist() == [pair for part in pairs for pair in part]
    assert routes.pair_counts == [len(part) for part in pairs]


@given(count=st.integers(0, 4), odd=st.integers(1, 5))
def test_pack_rows_unpack_rows_restores_tensors(count, odd):
    parts = (
        torch.randn(count, odd).bfloat16(),
        torch.randint(0, 9, (count, 3), dtype=torch.int32),
        torch.randn(count, 2),
    )
    packed = pack_rows(*parts)
    assert (packed.shape, packed.dtype) == ((count, 2 * odd + 12 + 8), torch.uint8)
    unpacked = unpack_rows(packed, like=parts)
    assert all(torch.equal(*pair) for pair in zip(parts, unpacked, strict=True))
