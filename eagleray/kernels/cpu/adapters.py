"""Low-rank adapters in the layout of the CPU's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.adapters import AdapterSite, AdapterTable, LowRankFactors
from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.storage import memory_of

ROW_GRAIN = 32
"""Rows of A are padded with zeros to a multiple of this many inputs: a vector of bfloat16 pairs."""

COLUMN_GRAIN = 16
"""The outputs of every layer in B are padded with zeros to a multiple of this number: a vector of float32."""


class NativeAdapterSite(AdapterSite):
    """See `AdapterSite`."""

    def __init__(self, table: AdapterTable, in_features: int, out_features: Sequence[int]) -> None:
        super().__init__(table, in_features, out_features)
        num_slots, rank, num_layers = table.num_slots, table.max_rank, len(out_features)
        padded = [_round_up(size, COLUMN_GRAIN) for size in out_features]
        self._starts = [sum(padded[:layer]) for layer in range(num_layers)]
        """Number of outputs, with their padding, of the layers before each."""
        self._a = table.zeros(num_slots, num_layers, rank, _round_up(in_features, ROW_GRAIN))
        self._b = table.zeros(num_slots, rank * sum(padded))
        """The factors B, in the order of reading: that of a layer begins at `_starts` times `max_rank`, and is
        [outputs / 16, rank, 16]."""
        self._sizes = np.array(out_features, dtype=np.int64)
        self._ranks = np.zeros((num_slots, num_layers), dtype=np.int32)
        """Rank of the adapter of each layer; 0: none."""
        self._scales = np.zeros((num_slots, num_layers), dtype=np.float32)

    def clear(self, slot: int) -> None:
        self._ranks[slot] = 0

    def storage(self) -> list[Tensor]:
        return memory_of(self._a, self._b)

    def c_site(self) -> CStruct:
        """Convert to C. The struct points into this object."""
        return abi.CAdapterSite(
            num_layers=len(self.out_features),
            max_rank=self.table.max_rank,
            k=self.in_features,
            a_stride=self._a.stride(2),
            b_stride=self._b.stride(0),
            a=self._a.data_ptr(),
            b=self._b.data_ptr(),
            ranks=self._ranks.ctypes.data,
            scales=self._scales.ctypes.data,
            sizes=self._sizes.ctypes.data,
        )

    def _write(self, slot: int, layer: int, factors: LowRankFactors) -> None:
        rank, size = len(factors.a), self.out_features[layer]
        padded = torch.zeros(_round_up(size, COLUMN_GRAIN), rank, dtype=self._b.dtype)
        padded[:size].copy_(factors.b)
        panels = padded.view(len(padded) // COLUMN_GRAIN, COLUMN_GRAIN, rank).transpose(1, 2)
        first = self._starts[layer] * self.table.max_rank
        self._a[slot, layer, :rank, : self.in_features].copy_(factors.a)
        self._b[slot, first : first + padded.numel()].view(panels.shape).copy_(panels)
        self._ranks[slot, layer], self._scales[slot, layer] = rank, factors.scale


def _round_up(number: int, grain: int) -> int:
    return -(-number // grain) * grain
