"""The operations between ranks that compute one model together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

OPERATION_SECONDS = 600.0
"""How long an operation waits for the other ranks. They may be in a step that takes long; a rank that ended is noticed
by the engine, much earlier."""


class RowGroup(Protocol):
    """Ranks that have different rows, or parts of one sum.

    Every rank makes the same calls in the same order, with the same dtypes and features; `counts` says for each rank,
    and is the same on all, how many rows it has: perhaps none. A call raises `DeadlineExceeded` if the others do not
    make it too, and `ChannelClosed` if one of them is gone and that can be noticed here; the group is of no use then.
    """

    rank: int
    size: int
    bytes_sent: dict[str, int]
    """By operation: how many bytes this rank has had for others, each counted once, however many others hear it."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on every rank; may be computed in `x` itself."""
        ...

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, in their order: [counts[rank], …] -> [sum(counts), …]."""
        ...

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's rows of the sum over all ranks, added up in their order: [sum(counts), …] -> [counts[rank], …].

        The arithmetic is that of `all_reduce`.
        """
        ...

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Rows for each rank, from each rank: [sum(send_counts), …] -> [sum(receive_counts), …], both in order of the
        ranks. What one rank sends to another is what that one receives from it."""
        ...


class TensorParallelGroup(RowGroup, Protocol):
    """The ranks that share every layer, a tensor-parallel group."""

    @property
    def is_ordered(self) -> bool:
        """Whether every sum is added up in the same order, whatever the shape."""
        ...

    def gather(self, x: Tensor) -> Tensor | None:
        """On rank 0 the tensors of all ranks, one after another along the last dimension; None on the others. Their
        shapes are the same."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """What rank 0 has, on every rank; may be written into `x` itself."""
        ...

    def close(self) -> None:
        """Leave the group; harmless when repeated."""
        ...


class SingleRankGroup:
    """A group of one: nothing is sent."""

    rank = 0
    size = 1
    is_ordered = True

    def __init__(self) -> None:
        self.bytes_sent: dict[str, int] = Counter()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def close(self) -> None:
        pass
