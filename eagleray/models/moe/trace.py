"""Which experts a forward pass chose: how many tokens each expert had, always, and if wanted each token's experts.

Made once for a model (or the part of one that a rank has) before its layers. They, or the kernels in their place, write
into it; the worker reads it between passes. Numbers of experts are the model's own, wherever their weights are. Rows
are those that this rank routes: of the whole batch, or of its share under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["MAX_TRACED_EXPERTS", "ExpertTrace"]

MAX_TRACED_EXPERTS = 65_535
"""What rows of uint16 are good for."""

MIN_ROWS = 64


class ExpertTrace:
    """`num_layers`: those with experts. `keeps_ids`: of every pass, until the next one; without it nothing is kept but
    counts."""

    def __init__(self, *, num_layers: int, num_experts: int, top_k: int, device: torch.device, keeps_ids: bool) -> None:
        assert not keeps_ids or num_experts <= MAX_TRACED_EXPERTS
        self.num_layers = num_layers
        self.top_k = top_k
        self.keeps_ids = keeps_ids
        self.dtype = torch.uint8 if num_experts <= 256 else torch.uint16
        """Of `ids`: the smallest one that holds the number of every expert, as `RoutingInfo.dtype`."""
        self._numpy_type = np.uint8 if self.dtype == torch.uint8 else np.uint16
        self.counts = torch.zeros((num_layers, num_experts), dtype=torch.int64, device=device)
        """[num_layers, num_experts] pairs of a token and an expert since the model was made. Stays where it is in
        memory: kernels add to it."""
        self._kept = torch.empty((num_layers, 0, top_k), dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)

    def note(self, layer: int, ids: Tensor) -> None:
        """The experts that a layer has chosen for all rows of this pass: [num_rows, top_k] integers on the device."""
        pairs = ids.reshape(-1).long()
        self.counts[layer].index_add_(0, pairs, self._one.expand(len(pairs)))
        if self.keeps_ids:
            self.reserve(len(ids))
            self._kept[layer, : len(ids)].copy_(ids)

    def reserve(self, num_rows: int) -> None:
        """Make room for passes of so many rows; what is kept stays. Afterwards `buffer` is where it is until more rows
        are reserved."""
        if self.keeps_ids and num_rows > self._kept.shape[1]:
            capacity = max(MIN_ROWS, 1 << (num_rows - 1).bit_length())
            grown = self._kept.new_zeros((self.num_layers, capacity, self.top_k))
            grown[:, : self._kept.shape[1]] = self._kept
            self._kept = grown

    def buffer(self, layer: int) -> Tensor:
        """int32 [reserved rows, top_k], into which kernels write a layer's experts themselves."""
        return self._kept[layer]

    def ids(self, lines: Tensor | npt.NDArray[np.integer] | Sequence[int], num_rows: int) -> Tensor:
        """[len(lines), num_layers, top_k] of `dtype`, on the device: the experts of these rows of the last pass, which
        had `num_rows`. A copy, in memory of its own."""
        assert self.keeps_ids
        if not self._kept.is_cuda:  # numpy takes a third of torch's time for so little
            by_layer = self._kept.numpy()[:, :num_rows].take(np.asarray(lines, np.intp), axis=1)
            return torch.from_numpy(by_layer.transpose(1, 0, 2).astype(self._numpy_type))
        where = torch.as_tensor(lines, dtype=torch.int64).to(self._kept.device)
        chosen = self._kept[:, :num_rows].index_select(1, where)
        return chosen.transpose(0, 1).contiguous().to(self.dtype)
