"""The expert slots of a layer: tables from an expert's number to the slots that hold its weights.

An expert slot is a place for one expert's weights. Every rank of the expert group has the same number of them: slot s
is the local slot s % slots_per_rank of rank s // slots_per_rank. An expert may be in several slots, as copies; the
slots of a rank that is about to leave the group are empty. Experts move between steps, and the tables are changed in
place, also their copies on a device, so that compiled passes may keep pointers to them. A group of another size has
other tables; passes that keep pointers belong to engines whose group never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]

Slots = npt.NDArray[np.int64]
"""[num_slots] the expert in each slot, -1 for an empty one"""

ABSENT = -1
"""Stands for a slot on another rank, or for the expert of an empty slot."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertSlotMap:
    """The slots of a layer's experts, of one rank or of all."""

    table: Int32Array
    """[num_experts, max_copies] slot of an expert's copy c; -1 if it is on another rank, or there are fewer copies"""
    num_copies: Int32Array
    """[num_experts] on all ranks, at least 1. A row uses the copy with the number row % num_copies."""
    _on_devices: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return copies of `table` and `num_copies` on a device. They keep their place, and `update_devices`
        changes them."""
        if device not in self._on_devices:
            self._on_devices[device] = (
                torch.from_numpy(self.table).to(device),
                torch.from_numpy(self.num_copies).to(device),
            )
        return self._on_devices[device]

    def update_devices(self) -> None:
        """Copy changes to the devices. The copies are ordered after all work that was launched before."""
        for table, num_copies in self._on_devices.values():
            if table.device.type != "cpu":  # there they share the memory
                table.copy_(torch.from_numpy(self.table))
                num_copies.copy_(torch.from_numpy(self.num_copies))

    def find(self, ids: Tensor, *, first_row: int = 0) -> Tensor:
        """Return the slots of the experts `ids` [num_rows, top_k], int32 of the same shape, -1 for absent ones. Copies
        of an expert take turns over the rows, whose numbers begin with `first_row`."""
        table, num_copies = self.on(ids.device)
        ids = ids.long()
        rows = torch.arange(first_row, first_row + len(ids), device=ids.device)[:, None]
        return table[ids, rows % num_copies[ids]]


class LayerExpertSlots:
    """The slots of one layer. `experts` is [num_slots] over all ranks."""

    def __init__(self, experts: Slots, *, num_experts: int, rank: int, num_ranks: int) -> None:
        assert len(experts) % num_ranks == 0
        shape = (num_experts, 1 + len(experts) - num_experts)
        num_copies = np.ones(num_experts, np.int32)
        self._rank = rank
        self.slots_per_rank = len(experts) // num_ranks
        self.local_map = ExpertSlotMap(np.full(shape, ABSENT, np.int32), num_copies)
        """This rank's slots, by their local numbers."""
        self.global_map = ExpertSlotMap(np.full(shape, ABSENT, np.int32), num_copies)
        """The slots of all ranks."""
        self.local_experts: list[int] = []
        """The experts whose weights are in this rank's slots, -1 for an empty slot."""
        self.assign(experts)

    def assign(self, experts: Slots) -> None:
        """Update the tables to other experts in the slots. Copies of an expert are numbered in the order of slots."""
        self.experts = experts.copy()
        self.local_experts = experts[self._rank * self.slots_per_rank :][: self.slots_per_rank].tolist()
        table, num_copies = self.global_map.table, self.global_map.num_copies
        table.fill(ABSENT)
        num_copies.fill(0)
        for slot, expert in enumerate(experts.tolist()):
            if expert != ABSENT:
                table[expert, num_copies[expert]] = slot
                num_copies[expert] += 1
        assert num_copies.min() > 0, "every expert has a slot"
        is_local = (table >= 0) & (table // self.slots_per_rank == self._rank)
        self.local_map.table[:] = np.where(is_local, table % self.slots_per_rank, ABSENT)
        for slot_map in (self.local_map, self.global_map):
            slot_map.update_devices()
