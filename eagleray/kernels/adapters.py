"""Low-rank adapters of products: the memory that holds them, and the tokens of a batch that have one.

An adapter adds `scale * B (A x)` to a product of `x`. A model has a number of slots, each of which may hold one adapter
in every product that can have one (`AdapterSite`). The memory is allocated once, because recorded passes keep its
addresses; slots are written between steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.forward_batch import AdapterGroups


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """An adapter of one layer: `scale * b @ a` is added to its weight."""

    a: Tensor
    """[rank, in_features]"""
    b: Tensor
    """[out_features, rank]"""
    scale: float


@dataclass
class AdapterTable:
    """The slots of a model's part for adapters of up to `max_rank`, in its dtype and on its device."""

    num_slots: int
    max_rank: int
    dtype: torch.dtype
    device: torch.device
    groups: AdapterGroups | None = None
    """Tokens of the batch that is computed now."""

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of the model's dtype. On a CPU they take no memory before they are written: the system provides
        the pages, because numpy allocates with calloc."""
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        num_bytes = int(np.prod(shape)) * self.dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(self.dtype).view(shape)


class AdapterSite(ABC):
    """The adapters of one product in all slots, in the layout of a backend. The product concatenates the outputs of
    layers, `out_features` of each, and each of them has factors of its own."""

    def __init__(self, table: AdapterTable, in_features: int, out_features: Sequence[int]) -> None:
        self.table = table
        self.in_features = in_features
        self.out_features = tuple(out_features)

    def write(self, slot: int, layer: int, factors: LowRankFactors) -> None:
        """Put an adapter of a layer into a slot that was cleared. No pass may run."""
        rank = len(factors.a)
        assert rank <= self.table.max_rank
        assert factors.a.shape == (rank, self.in_features) and factors.b.shape == (self.out_features[layer], rank)
        self._write(slot, layer, factors)

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Have the slot hold no adapter of any layer."""

    @abstractmethod
    def storage(self) -> list[Tensor]:
        """Return the memory of the factors."""

    @abstractmethod
    def _write(self, slot: int, layer: int, factors: LowRankFactors) -> None:
        """Put factors of the right shapes into a slot."""
