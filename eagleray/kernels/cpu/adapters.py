"""Low-rank adapters in the layout of the CPU's kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.adapters import AdapterSite, AdapterTable, LowRankFactors
from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.cpu.huge_pages import WeightMemory
from eagleray.kernels.kv_cache import CACHE_LINE_BYTES
from eagleray.kernels.storage import memory_of

LANES = 16
"""Numbers of float32, or pairs of bfloat16, in a vector."""

ROW_BLOCK = 8
"""Most rows of A that are stored together."""

SLOT_SKEW_BYTES = 9 * CACHE_LINE_BYTES
"""Distance of the factors B of two slots beyond their size. A pass reads them in turn: at equal places of pages they
would evict each other from the first-level cache."""


class NativeAdapterSite(AdapterSite):
    """See `AdapterSite`."""

    def __init__(
        self, table: AdapterTable, memory: WeightMemory, in_features: int, out_features: Sequence[int]
    ) -> None:
        super().__init__(table, in_features, out_features)
        num_slots, rank, num_layers = table.num_slots, table.max_rank, len(out_features)
        self._pair = torch.float32.itemsize // table.dtype.itemsize
        padded = [_round_up(size, LANES) for size in out_features]
        self._starts = [sum(padded[:layer]) for layer in range(num_layers)]
        """Number of outputs, with their padding, of the layers before each."""
        shape = (num_slots, num_layers, rank, _round_up(in_features, LANES * self._pair))
        self._a = memory.allocate(math.prod(shape), table.dtype).view(shape)
        """The factors A, in the order of reading: the rows of a layer in blocks of 8, at the end of 4, 2 and 1, each
        [inputs / vector, rows, vector], where a vector is 16 pairs."""
        size = _round_up(rank, self._pair) * sum(padded)
        stride = size + SLOT_SKEW_BYTES // table.dtype.itemsize
        self._b = memory.allocate(num_slots * stride, table.dtype).view(num_slots, stride)
        """The factors B, in the order of reading: that of a layer begins at `_starts` times `max_rank`, rounded up to
        pairs, and is [outputs / 16, rank / pair, 16, pair]."""
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
        vector = LANES * self._pair
        first = 0
        for num_rows in _row_blocks(rank):
            block = self._a[slot, layer, first : first + num_rows]
            rows = torch.zeros_like(block)
            rows[:, : self.in_features] = factors.a[first : first + num_rows]
            block.view(-1, num_rows, vector).copy_(rows.view(num_rows, -1, vector).transpose(0, 1))
            first += num_rows
        padded = torch.zeros(_round_up(size, LANES), _round_up(rank, self._pair), dtype=self._b.dtype)
        padded[:size, :rank] = factors.b
        panels = padded.view(len(padded) // LANES, LANES, -1, self._pair).transpose(1, 2)
        start = self._starts[layer] * _round_up(self.table.max_rank, self._pair)
        self._b[slot, start : start + padded.numel()].view(panels.shape).copy_(panels)
        self._ranks[slot, layer], self._scales[slot, layer] = rank, factors.scale


def _row_blocks(rank: int) -> list[int]:
    """Return the numbers of rows of the blocks in which a factor A is stored."""
    last = [size for size in (4, 2, 1) if rank % ROW_BLOCK & size]
    return [ROW_BLOCK] * (rank // ROW_BLOCK) + last


def _round_up(number: int, grain: int) -> int:
    return -(-number // grain) * grain
