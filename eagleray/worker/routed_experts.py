"""The experts that computed the tokens of a step, from the model's trace to an array of the host.

Owned by the runner, which begins to read after the layers have run and finishes when it makes the step's result; the
work between, above all the choice of tokens, does not wait for the copy. Tensor-parallel ranks that compute all tokens
of the batch have the same trace, so the first one reports; if each computes a shard of the tokens, it gathers theirs.
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
"""Waits for the copy and returns it: [num_tokens, num_layers, top_k] in memory of its own."""

IntArray = npt.NDArray[np.integer[Any]]


class ExpertsReader:
    """Reads the trace. `has_sequence_shards` says whether the trace has only this rank's shard of the tokens."""

    def __init__(self, trace: ExpertTrace, tp: TensorParallelGroup, *, has_sequence_shards: bool) -> None:
        self._trace = trace
        self._tp = tp
        self._has_sequence_shards = has_sequence_shards and tp.size > 1 and trace.num_layers > 0
        self._stream: torch.cuda.Stream | None = None
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def begin(self, indices: IntArray | None, num_tokens: int) -> Reading | None:
        """Begin to read the experts of the tokens at `indices` of the last pass, which had `num_tokens`, or of all
        tokens, in the layers of this stage. Every rank of the tensor-parallel group must call this; it returns None on
        ranks that report nothing."""
        if self._has_sequence_shards:
            ids = self._gather(np.arange(num_tokens) if indices is None else indices, num_tokens)
        elif self._tp.rank != 0:
            return None
        elif (rows := self._trace.host_ids(indices, num_tokens)) is not None:
            return lambda: rows
        else:
            ids = self._trace.ids(indices, num_tokens)
        if ids is None:
            return None
        return self._copy_to_pinned(ids) if ids.is_cuda else lambda: ids.numpy()

    def _gather(self, indices: IntArray, num_tokens: int) -> Tensor | None:
        """Gather the tokens of all shards on rank 0. Shards are consecutive parts of the batch, so each rank sends the
        tokens of its own shard in the order of the batch, and rank 0 restores the order of `indices`."""
        order = np.argsort(indices, kind="stable")
        counts = token_counts(num_tokens, self._tp.size)
        bounds = np.cumsum([0, *counts])
        cuts = np.searchsorted(indices[order], bounds)
        rank = self._tp.rank
        own = indices[order][cuts[rank] : cuts[rank + 1]] - bounds[rank]
        ids = self._trace.ids(own, counts[rank])
        # int32, because collectives have no uint16
        gathered = self._tp.all_gather(ids.to(torch.int32).flatten(1), np.diff(cuts).tolist())
        if rank != 0:
            return None
        in_order = gathered[torch.from_numpy(np.argsort(order)).to(gathered.device)]
        return in_order.unflatten(1, ids.shape[1:]).to(ids.dtype)

    def _copy_to_pinned(self, ids: Tensor) -> Reading:
        """Begin to copy `ids` from a GPU into pinned memory of the host, while the GPU computes. A worker runs one step
        at a time, and the result is copied once more, so no two steps ever share the memory."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(ids.device)
        num_bytes = ids.numel() * ids.element_size()
        if num_bytes > len(self._pinned):
            self._pinned = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=True)
        target = self._pinned[:num_bytes].view(ids.dtype).view(ids.shape)
        self._stream.wait_stream(torch.cuda.current_stream(ids.device))
        with torch.cuda.stream(self._stream):
            target.copy_(ids, non_blocking=True)
            copied = self._stream.record_event()
        ids.record_stream(self._stream)  # keeps its memory from reuse until it is read

        def finish() -> Array:
            copied.synchronize()
            return target.numpy().copy()

        return finish
