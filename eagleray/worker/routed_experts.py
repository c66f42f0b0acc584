"""The experts that computed the tokens of a step, from the model's trace.

Owned by the runner, which reads them after the layers have run. Tensor-parallel ranks that compute all tokens of the
batch have the same trace, so the first one reports; if each computes a shard of the tokens, it gathers theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.uploads import upload
from eagleray.messages.arrays import Array
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.token_shards import token_counts

IntArray = npt.NDArray[np.integer[Any]]


class ExpertsReader:
    """Reads the trace. `has_sequence_shards` says whether the trace has only this rank's shard of the tokens."""

    def __init__(self, trace: ExpertTrace, tp: TensorParallelGroup, *, has_sequence_shards: bool) -> None:
        self._trace = trace
        self._tp = tp
        self._has_sequence_shards = has_sequence_shards and tp.size > 1 and trace.num_layers > 0

    def read(self, indices: IntArray | None, num_tokens: int) -> Array | Tensor | None:
        """Return the experts of the tokens at `indices` of the last pass, which had `num_tokens`, or of all tokens, in
        the layers of this stage: a copy [num_tokens, num_layers, top_k], as an array if the host has it. Every rank of
        the tensor-parallel group must call this; it returns None on ranks that report nothing."""
        if self._has_sequence_shards:
            return self._gather(np.arange(num_tokens) if indices is None else indices, num_tokens)
        if self._tp.rank != 0:
            return None
        host = self._trace.host_ids(indices, num_tokens)
        return self._trace.ids(indices, num_tokens) if host is None else host

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
        in_order = gathered[upload(np.argsort(order), gathered.device)]
        return in_order.unflatten(1, ids.shape[1:]).to(ids.dtype)
