"""Low-rank adapters in plain torch, on any device. They define what every other backend computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.adapters import AdapterSite, AdapterTable, LowRankFactors
from eagleray.kernels.storage import memory_of


class TorchAdapterSite(AdapterSite):
    """See `AdapterSite`."""

    def __init__(self, table: AdapterTable, in_features: int, out_features: Sequence[int]) -> None:
        super().__init__(table, in_features, out_features)
        self._a = table.zeros(table.num_slots, len(out_features), table.max_rank, in_features)
        self._b = [table.zeros(table.num_slots, size, table.max_rank) for size in out_features]
        self._ranks = np.zeros((table.num_slots, len(out_features)), dtype=np.int32)
        """Rank of the adapter of each layer; 0: none."""
        self._scales = np.zeros((table.num_slots, len(out_features)), dtype=np.float32)

    def clear(self, slot: int) -> None:
        self._ranks[slot] = 0

    def storage(self) -> list[Tensor]:
        return memory_of(self._a, *self._b)

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add the adapters of this batch to a product `y` [num_tokens, sum of `out_features`] of `x` [num_tokens,
        in_features]."""
        groups = self.table.groups
        if groups is None:
            return
        all_tokens = torch.from_numpy(groups.tokens).long().to(x.device)
        for slot, first, last in zip(groups.slots, groups.offsets[:-1], groups.offsets[1:], strict=True):
            tokens, end = all_tokens[first:last], 0
            inputs = x[tokens]
            for layer, (rank, size) in enumerate(zip(self._ranks[slot], self.out_features, strict=True)):
                start, end = end, end + size
                if rank > 0:
                    inner = inputs @ self._a[slot, layer, :rank].T
                    product = inner @ self._b[layer][slot, :, :rank].T
                    y[tokens, start:end] += product * float(self._scales[slot, layer])

    def _write(self, slot: int, layer: int, factors: LowRankFactors) -> None:
        rank = len(factors.a)
        self._a[slot, layer, :rank].copy_(factors.a)
        self._b[layer][slot, :, :rank].copy_(factors.b)
        self._ranks[slot, layer], self._scales[slot, layer] = rank, factors.scale
