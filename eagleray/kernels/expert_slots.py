"""Where the experts of a layer are: tables from an expert's number to the slots that hold its weights.

A slot is a place for one expert's weights. Every rank of the expert group has the same number of them: slot s is the
own slot s % slots_per_rank of rank s // slots_per_rank. An expert may be in several slots, as copies. The tables are
changed in place, between steps, when experts are moved: what computes with them may keep pointers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]

Slots = npt.NDArray[np.int64]
"""[num_slots] the expert in each slot"""

ABSENT = -1
"""In place of a slot that is on another rank."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertSlotMap:
    """Which slot has which expert of a layer: of one rank, or of all."""

    table: Int32Array
    """[num_experts, max_copies] the slot that holds the c-th copy of an expert; -1: it is on another rank, or there are
    not so many copies"""
    num_copies: Int32Array
    """[num_experts] on all ranks, at least 1. A row takes the copy with the number row % num_copies."""

    def find(self, ids: Tensor, *, first_row: int = 0) -> Tensor:
        """The slots of these experts, int32 like ids [num_rows, top_k]; -1: in none. Copies of an expert take turns
        over the rows, of which these begin with number `first_row`."""
        table = torch.as_tensor(self.table, device=ids.device)
        num_copies = torch.as_tensor(self.num_copies, device=ids.device)
        ids = ids.long()
        rows = torch.arange(first_row, first_row + len(ids), device=ids.device)[:, None]
        return table[ids, rows % num_copies[ids]]


class LayerExpertSlots:
    """`experts` [num_slots]: the expert in each slot, of all ranks."""

    def __init__(self, experts: Slots, *, num_experts: int, rank: int, num_ranks: int) -> None:
        assert len(experts) % num_ranks == 0
        shape = (num_experts, 1 + len(experts) - num_experts)
        num_copies = np.ones(num_experts, np.int32)
        self._rank = rank
        self.slots_per_rank = len(experts) // num_ranks
        self.local = ExpertSlotMap(np.full(shape, ABSENT, np.int32), num_copies)
        """This rank's slots, by its own numbers."""
        self.everywhere = ExpertSlotMap(np.full(shape, ABSENT, np.int32), num_copies)
        """The slots of all ranks."""
        self.experts = experts
        self.put(experts)

    @property
    def own(self) -> list[int]:
        """The experts in this rank's slots."""
        return self.experts[self._rank * self.slots_per_rank :][: self.slots_per_rank].tolist()

    def put(self, experts: Slots) -> None:
        """Other experts are in the slots now. Copies of an expert are numbered in the order of their slots."""
        self.experts = experts.copy()
        table, num_copies = self.everywhere.table, self.everywhere.num_copies
        table.fill(ABSENT)
        num_copies.fill(0)
        for slot, expert in enumerate(experts.tolist()):
            table[expert, num_copies[expert]] = slot
            num_copies[expert] += 1
        assert num_copies.min() > 0, "every expert has a slot"
        is_own = (table >= 0) & (table // self.slots_per_rank == self._rank)
        self.local.table[:] = np.where(is_own, table % self.slots_per_rank, ABSENT)
