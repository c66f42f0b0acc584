"""Which experts computed the tokens that a step reports: from the model's trace to an array of the host.

Owned by the runner, which begins to read after the layers have run and ends when it makes the step's result; what is
between, above all the choice of tokens, does not wait for the copy. Every tensor-parallel rank that has all rows of the
batch knows the same, so the first one reports; where ranks have shares of the rows, it gathers what each one knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.messages.arrays import Array
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.token_shards import token_counts

Reading = Callable[[], Array]
"""Waits for what is being read: [num_lines, num_layers, top_k] in memory of its own."""

IntArray = npt.NDArray[np.integer[Any]]


class ExpertsReader:
    """`has_row_shares`: the trace has this rank's share of the rows alone."""

    def __init__(self, trace: ExpertTrace, tp: TensorParallelGroup, *, has_sequence_shards: bool) -> None:
        self._trace = trace
        self._tp = tp
        self._has_row_shares = has_sequence_shards and tp.size > 1 and trace.num_layers > 0
        self._pinned = _PinnedCopy()

    def begin(self, lines: IntArray | None, num_tokens: int) -> Reading | None:
        """Read the experts of these tokens of the last pass, which had `num_tokens`, or of all, by the layers of this
        stage. To be called on every rank of the tensor-parallel group; None on those that have nothing to report."""
        if self._has_row_shares:
            ids = self._gather(np.arange(num_tokens) if lines is None else lines, num_tokens)
        elif self._tp.rank != 0:
            return None
        elif (rows := self._trace.host_ids(lines, num_tokens)) is not None:
            return lambda: rows
        else:
            ids = self._trace.ids(lines, num_tokens)
        if ids is None:
            return None
        return self._pinned.begin(ids) if ids.is_cuda else lambda: ids.numpy()

    def _gather(self, lines: IntArray, num_tokens: int) -> Tensor | None:
        """Shares follow each other in the batch: each rank brings what is in its own, in the batch's order."""
        order = np.argsort(lines, kind="stable")
        shares = token_counts(num_tokens, self._tp.size)
        bounds = np.cumsum([0, *shares])
        cuts = np.searchsorted(lines[order], bounds)
        rank = self._tp.rank
        own = lines[order][cuts[rank] : cuts[rank + 1]] - bounds[rank]
        ids = self._trace.ids(own, shares[rank])
        # int32: collectives do not know uint16
        gathered = self._tp.all_gather(ids.to(torch.int32).flatten(1), np.diff(cuts).tolist())
        if rank != 0:
            return None
        in_order = gathered[torch.from_numpy(np.argsort(order)).to(gathered.device)]
        return in_order.unflatten(1, ids.shape[1:]).to(ids.dtype)


class _PinnedCopy:
    """From a GPU to the host beside what the GPU computes, into memory that it can write by itself.

    A worker has one step at a time, and what leaves it is copied once more: no two steps ever share the memory.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def begin(self, ids: Tensor) -> Reading:
        if self._stream is None:
            self._stream = torch.cuda.Stream(ids.device)
        num_bytes = ids.numel() * ids.element_size()
        if num_bytes > len(self._memory):
            self._memory = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=True)
        here = self._memory[:num_bytes].view(ids.dtype).view(ids.shape)
        self._stream.wait_stream(torch.cuda.current_stream(ids.device))
        with torch.cuda.stream(self._stream):
            here.copy_(ids, non_blocking=True)
            copied = self._stream.record_event()
        ids.record_stream(self._stream)  # its memory is not given to others before it is read

        def finish() -> Array:
            copied.synchronize()
            return here.numpy().copy()

        return finish
