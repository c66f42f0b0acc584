"""The tables of expert slots."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagleray.kernels.expert_slots import LayerExpertSlots


@given(st.integers(1, 10), st.integers(1, 4), st.integers(0, 3))
def test_expert_slots_assign_updates_the_tables_of_all_ranks(num_experts, num_ranks, more):
    per_rank = -(-num_experts // num_ranks) + more
    num_slots = per_rank * num_ranks
    first_slots = np.arange(num_slots) % num_experts
    ranks = [
        LayerExpertSlots(first_slots, num_experts=num_experts, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    for slots in ranks:
        slots.assign(np.flip(first_slots))
    experts = ranks[0].experts
    for rank, slots in enumerate(ranks):
        assert slots.local_experts == experts[rank * per_rank : (rank + 1) * per_rank].tolist()
        assert slots.local_map.num_copies.sum() == num_slots
        for expert in range(num_experts):
            copies = slots.global_map.table[expert][: slots.local_map.num_copies[expert]]
            assert [experts[slot] for slot in copies] == [expert] * len(copies)
            assert len(set(copies.tolist())) == len(copies)
            own = [slot % per_rank if slot // per_rank == rank else -1 for slot in copies]
            assert slots.local_map.table[expert].tolist() == own + [-1] * (slots.local_map.table.shape[1] - len(own))


def test_expert_slots_on_a_device_stay_in_place_when_experts_move():
    slots = LayerExpertSlots(np.array([0, 1, 2, 0]), num_experts=3, rank=0, num_ranks=2)
    table, num_copies = slots.local_map.on(torch.device("cpu"))
    assert table.tolist() == [[0, -1], [1, -1], [-1, -1]] and num_copies.tolist() == [2, 1, 1]
    slots.assign(np.array([2, 2, 1, 0]))
    assert table.tolist() == [[-1, -1], [-1, -1], [0, 1]] and num_copies.tolist() == [1, 1, 2]
    assert slots.local_map.on(torch.device("cpu"))[0] is table
    assert slots.global_map.find(torch.tensor([[2], [2]])).tolist() == [[0], [1]]
