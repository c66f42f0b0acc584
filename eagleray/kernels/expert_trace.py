"""The experts that forward passes chose: always the number of tokens of each expert, on request each token's experts.

Made once for a model (or a rank's part of one) before its layers. They, or the kernels in their place, write to it; the
worker reads it between passes. Experts have the model's own numbers, wherever their weights are. Rows are the tokens
that this rank routes: those of the whole batch, or of its slice under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagleray.kernels.uploads import upload

MAX_TRACED_EXPERTS = 65_535
"""Limit of uint16."""

MIN_ROWS = 64

IntArray = npt.NDArray[np.integer]
UnsignedArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class ExpertTrace:
    """`num_layers` counts the layers with experts. With `keeps_ids` each pass's experts are kept until the next pass,
    otherwise only counts."""

    def __init__(self, *, num_layers: int, num_experts: int, top_k: int, device: torch.device, keeps_ids: bool) -> None:
        assert not keeps_ids or num_experts <= MAX_TRACED_EXPERTS
        self.num_layers = num_layers
        self.top_k = top_k
        self.keeps_ids = keeps_ids
        self.dtype = torch.uint8 if num_experts <= 256 else torch.uint16
        """Dtype of `ids`: the smallest that holds every expert's number, as `RoutingInfo.dtype`."""
        self.counts = torch.zeros((num_layers, num_experts), dtype=torch.int64, device=device)
        """[num_layers, num_experts] pairs of a token and an expert since the model was made. Never moves in memory:
        kernels add to it."""
        self._keep_in(torch.empty((0, num_layers, top_k), dtype=self.dtype, device=device))
        self._one = torch.ones(1, dtype=torch.int64, device=device)

    def record(self, layer: int, ids: Tensor) -> None:
        """Record the experts that a layer chose for all rows of this pass: [num_rows, top_k] integers on the device."""
        pairs = ids.reshape(-1).long()
        self.counts[layer].index_add_(0, pairs, self._one.expand(len(pairs)))
        if self.keeps_ids:
            self.reserve(len(ids))
            self._kept[: len(ids), layer].copy_(ids)

    def reserve(self, num_rows: int) -> None:
        """Make room for passes of `num_rows` and keep the stored ids. Afterwards `buffer` stays in place until a
        larger call."""
        if self.keeps_ids and num_rows > len(self._kept):
            capacity = max(MIN_ROWS, 1 << (num_rows - 1).bit_length())
            grown = self._kept.new_zeros((capacity, self.num_layers, self.top_k))
            grown[: len(self._kept)] = self._kept
            self._keep_in(grown)

    def buffer(self, layer: int) -> Tensor:
        """Return the memory [reserved rows, top_k] of `dtype`, strided by row, that kernels write a layer's experts
        to."""
        return self._kept[:, layer]

    def ids(self, rows: IntArray | Sequence[int] | None, num_rows: int) -> Tensor:
        """Return the experts of some rows of the last pass, which had `num_rows`, or of all of them (None).

        The result is a copy on the device: [len(rows), num_layers, top_k] of `dtype`.
        """
        host = self.host_ids(rows, num_rows)
        if host is not None:
            return torch.from_numpy(host)
        kept = self._kept[:num_rows]
        if rows is None:
            return kept.clone()
        indices = upload(np.asarray(rows, dtype=np.int64), kept.device)
        if self.dtype == torch.uint16:  # torch cannot index it
            return kept.view(torch.int16).index_select(0, indices).view(torch.uint16)
        return kept.index_select(0, indices)

    def host_ids(self, rows: IntArray | Sequence[int] | None, num_rows: int) -> UnsignedArray | None:
        """Like `ids`, but as an array, which is several times as fast. None if the trace is on a device."""
        assert self.keeps_ids
        self.reserve(num_rows)  # a stage without experts never records, so nothing else makes room
        if self._host is None:
            return None
        return self._host[:num_rows].copy() if rows is None else self._host.take(rows, axis=0)

    def _keep_in(self, memory: Tensor) -> None:
        self._kept = memory
        self._host = None if memory.is_cuda else memory.numpy()
