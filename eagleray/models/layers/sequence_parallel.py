"""Sequence parallelism: between attention and the experts each rank has a share of the batch's rows, not all of them.

The rows of the hidden state are the same on every tensor-parallel rank. An attention's products are summed by a
reduce-scatter, which leaves each rank the sums of its own rows; those are added to its share of the hidden state, go
through what follows, and an all-gather makes the hidden state whole again. Which rows are whose: `token_shard`.
"""

from __future__ import annotations

from torch import Tensor

from eagleray.kernels.torch.backend import HiddenStates, TorchBackend
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.token_shards import token_counts, token_shard


class SequenceParallel:
    """Of rows with `size` features, among the ranks of `tp`."""

    def __init__(self, kernels: TorchBackend, tp: TensorParallelGroup, size: int) -> None:
        self._kernels = kernels
        self._tp = tp
        self._size = size

    def share(self, rows: HiddenStates) -> HiddenStates:
        """Of rows that every rank has, this rank's."""
        return self._kernels.host(self._share, [rows], size=self._size, is_share=True)

    def reduce_scatter(self, products: HiddenStates) -> HiddenStates:
        """The sums over the ranks, of this rank's rows."""
        return self._kernels.host(self._reduce_scatter, [products], size=self._size, is_share=True)

    def all_gather(self, share: HiddenStates, whole: HiddenStates) -> HiddenStates:
        """The rows of every rank's share, on every rank. `whole`: any rows of the whole batch, for their number."""
        return self._kernels.host(self._all_gather, [share, whole], size=self._size, is_share=False)

    def _share(self, rows: Tensor) -> Tensor:
        own = token_shard(len(rows), self._tp)
        return rows[own.start : own.stop]

    def _reduce_scatter(self, products: Tensor) -> Tensor:
        return self._tp.reduce_scatter(products, token_counts(len(products), self._tp.size))

    def _all_gather(self, share: Tensor, whole: Tensor) -> Tensor:
        return self._tp.all_gather(share, token_counts(len(whole), self._tp.size))
