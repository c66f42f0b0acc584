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

MAX_TRACED_EXPERTS = 65_535
"""What rows of uint16 are good for."""

MIN_ROWS = 64

IntArray = npt.NDArray[np.integer]
UnsignedArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


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
        self.counts = torch.zeros((num_layers, num_experts), dtype=torch.int64, device=device)
        """[num_layers, num_experts] pairs of a token and an expert since the model was made. Stays where it is in
        memory: kernels add to it."""
        self._keep_in(torch.empty((0, num_layers, top_k), dtype=self.dtype, device=device))
        self._one = torch.ones(1, dtype=torch.int64, device=device)

    def note(self, layer: int, ids: Tensor) -> None:
        """The experts that a layer has chosen for all rows of this pass: [num_rows, top_k] integers on the device."""
        pairs = ids.reshape(-1).long()
        self.counts[layer].index_add_(0, pairs, self._one.expand(len(pairs)))
        if self.keeps_ids:
            self.reserve(len(ids))
            self._kept[: len(ids), layer].copy_(ids)

    def reserve(self, num_rows: int) -> None:
        """Make room for passes of so many rows; what is kept stays. Afterwards `buffer` is where it is until more rows
        are reserved."""
        if self.keeps_ids and num_rows > len(self._kept):
            capacity = max(MIN_ROWS, 1 << (num_rows - 1).bit_length())
            grown = self._kept.new_zeros((capacity, self.num_layers, self.top_k))
            grown[: len(self._kept)] = self._kept
            self._keep_in(grown)

    def buffer(self, layer: int) -> Tensor:
        """[reserved rows, top_k] of `dtype`, rows apart, into which kernels write a layer's experts themselves."""
        return self._kept[:, layer]

    def ids(self, lines: IntArray | Sequence[int] | None, num_rows: int) -> Tensor:
        """[len(lines), num_layers, top_k] of `dtype`, on the device: the experts of these rows of the last pass, which
        had `num_rows`, or of all of them. A copy, in memory of its own."""
        host = self.host_ids(lines, num_rows)
        if host is not None:
            return torch.from_numpy(host)
        kept = self._kept[:num_rows]
        if lines is None:
            return kept.clone()
        where = torch.as_tensor(lines, dtype=torch.int64).to(kept.device)
        if self.dtype == torch.uint16:  # which torch cannot index
            return kept.view(torch.int16).index_select(0, where).view(torch.uint16)
        return kept.index_select(0, where)

    def host_ids(self, lines: IntArray | Sequence[int] | None, num_rows: int) -> UnsignedArray | None:
        """As `ids`, of a trace on the host, for which torch would take several times as long. None of one that is on a
        device."""
        assert self.keeps_ids
        self.reserve(num_rows)  # where no layer has experts, nothing has made room
        if self._host is None:
            return None
        return self._host[:num_rows].copy() if lines is None else self._host.take(lines, axis=0)

    def _keep_in(self, memory: Tensor) -> None:
        self._kept = memory
        self._host = None if memory.is_cuda else memory.numpy()
