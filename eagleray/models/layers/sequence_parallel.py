"""Sequence parallelism: between attention and the experts each tensor-parallel rank holds some of the batch's tokens.

The hidden states are the same on all ranks at first. A reduce-scatter adds up the ranks' products of an attention and
leaves each rank the sums of its own tokens. These are added to the rank's slice of the hidden states and go through the
experts; then an all-gather makes the hidden states whole again. `token_shard` says which tokens are whose.
"""

from __future__ import annotations

from torch import Tensor

from eagleray.kernels.backend import HiddenStates, KernelBackend
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.token_shards import token_counts, token_shard


class SequenceParallel:
    """The changes between whole and sharded hidden states of `size` features, over the ranks of `tp`."""

    def __init__(self, kernels: KernelBackend, tp: TensorParallelGroup, size: int) -> None:
        self._kernels = kernels
        self._tp = tp
        self._size = size

    def local_slice(self, hidden: HiddenStates) -> HiddenStates:
        """Return this rank's slice of a tensor that is replicated on all ranks."""
        return self._kernels.host(self._local_slice, [hidden], size=self._size, is_sequence_sharded=True)

    def reduce_scatter(self, products: HiddenStates) -> HiddenStates:
        """Add up the products of all ranks, and return the sums of this rank's tokens."""
        return self._kernels.host(self._reduce_scatter, [products], size=self._size, is_sequence_sharded=True)

    def all_gather(self, local: HiddenStates, whole: HiddenStates) -> HiddenStates:
        """Return the slices of all ranks as one tensor. Of `whole`, any tensor of the whole batch, only the number of
        tokens is used."""
        return self._kernels.host(self._all_gather, [local, whole], size=self._size, is_sequence_sharded=False)

    def _local_slice(self, hidden: Tensor) -> Tensor:
        own = token_shard(len(hidden), self._tp)
        return hidden[own.start : own.stop]

    def _reduce_scatter(self, products: Tensor) -> Tensor:
        return self._tp.reduce_scatter(products, token_counts(len(products), self._tp.size))

    def _all_gather(self, local: Tensor, whole: Tensor) -> Tensor:
        return self._tp.all_gather(local, token_counts(len(whole), self._tp.size))
