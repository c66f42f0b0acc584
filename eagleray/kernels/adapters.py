"""Low-rank adapters of products: the memory that holds them, and the tokens of a batch that have one.

An adapter adds `scale * B (A x)` to a product of `x`. A model has a number of slots, each of which may hold one adapter
in every product that can have one (`AdapterSite`). The memory is allocated once, because recorded passes keep its
addresses; slots are written between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.forward_batch import AdapterGroups

ROW_GRAIN = 32
"""Rows of A are padded with zeros to a multiple of this many inputs: a vector of bfloat16 pairs."""

COLUMN_GRAIN = 16
"""The outputs of every layer in B are padded with zeros to a multiple of this number: a vector of float32."""


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """An adapter of one layer: `scale * b @ a` is added to its weight."""

    a: Tensor
    """[rank, in_features]"""
    b: Tensor
    """[out_features, rank]"""
    scale: float


class AdapterSite:
    """The adapters of one product in all slots. The product concatenates the outputs of layers; each of them has
    factors of its own."""

    def __init__(self, table: AdapterTable, in_features: int, out_features: Sequence[int]) -> None:
        num_slots, rank, num_layers = table.num_slots, table.max_rank, len(out_features)
        self.table = table
        self.in_features = in_features
        self.out_features = np.array(out_features, dtype=np.int64)
        padded = [_round_up(size, COLUMN_GRAIN) for size in out_features]
        self.starts = [sum(padded[:layer]) for layer in range(num_layers)]
        """Number of outputs, with their padding, of the layers before each."""
        self.a = _zeros((num_slots, num_layers, rank, _round_up(in_features, ROW_GRAIN)), table.dtype)
        self.b = _zeros((num_slots, rank * sum(padded)), table.dtype)
        """The factors B, in the order of reading: that of a layer begins at `starts` times `max_rank`, and is
        [outputs / 16, rank, 16]."""
        self.ranks = np.zeros((num_slots, num_layers), dtype=np.int32)
        """Rank of the adapter of each layer; 0: none."""
        self.scales = np.zeros((num_slots, num_layers), dtype=np.float32)

    def write(self, slot: int, layer: int, factors: LowRankFactors) -> None:
        """Put an adapter of a layer into a slot that was cleared. No pass may run."""
        rank, size = len(factors.a), int(self.out_features[layer])
        assert factors.a.shape == (rank, self.in_features) and factors.b.shape == (size, rank)
        padded = torch.zeros(_round_up(size, COLUMN_GRAIN), rank, dtype=self.b.dtype)
        padded[:size].copy_(factors.b)
        self.a[slot, layer, :rank, : self.in_features].copy_(factors.a)
        self._panels(slot, layer, rank).copy_(
            padded.view(len(padded) // COLUMN_GRAIN, COLUMN_GRAIN, rank).transpose(1, 2)
        )
        self.ranks[slot, layer], self.scales[slot, layer] = rank, factors.scale

    def clear(self, slot: int) -> None:
        """Have the slot hold no adapter of any layer."""
        self.ranks[slot] = 0

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add the adapters of this batch to a product `y` [num_tokens, sum of `out_features`] of `x` [num_tokens,
        in_features], in plain torch."""
        groups = self.table.groups
        if groups is None:
            return
        ends = np.cumsum(self.out_features)
        for slot, first, last in zip(groups.slots, groups.offsets[:-1], groups.offsets[1:], strict=True):
            tokens = torch.from_numpy(groups.tokens[first:last]).long()
            inputs = x[tokens]
            for layer, rank in enumerate(self.ranks[slot]):
                if rank == 0:
                    continue
                size, end = int(self.out_features[layer]), int(ends[layer])
                inner = inputs @ self.a[slot, layer, :rank, : self.in_features].T
                b = self._panels(slot, layer, rank).transpose(1, 2).reshape(-1, rank)[:size]
                y[tokens, end - size : end] += inner @ b.T * float(self.scales[slot, layer])

    def _panels(self, slot: int, layer: int, rank: int) -> Tensor:
        """Return the memory of a factor B, [outputs / 16, rank, 16]."""
        first = self.starts[layer] * self.table.max_rank
        num_panels = _round_up(int(self.out_features[layer]), COLUMN_GRAIN) // COLUMN_GRAIN
        size = num_panels * rank * COLUMN_GRAIN
        return self.b[slot, first : first + size].view(num_panels, rank, COLUMN_GRAIN)


class AdapterTable:
    """The slots of a model's part for adapters of up to `max_rank`, in its dtype, and the sites that have them."""

    def __init__(self, *, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.groups: AdapterGroups | None = None
        """Tokens of the batch that is computed now."""

    def site(self, in_features: int, out_features: Sequence[int]) -> AdapterSite:
        """Make the memory of one product, which takes none before it is written."""
        return AdapterSite(self, in_features, out_features)


def _round_up(number: int, grain: int) -> int:
    return -(-number // grain) * grain


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros whose pages the system provides when they are first written: numpy allocates with calloc."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
