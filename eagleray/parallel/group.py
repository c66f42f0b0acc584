"""The operations between ranks that compute one model together, and the order in which their sums are added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class TensorParallelGroup(Protocol):
    """The ranks that share every layer. An expert group has the same operations, see `ExpertGroup`.

    Every rank makes the same calls in the same order, with the same dtypes and features. A call raises
    `DeadlineExceeded` if the others do not make it too, and `ChannelClosed` if one of them is gone and this can be
    noticed here; the group cannot be used afterwards.

    Rows are the first dimension of a tensor. `counts` holds the number of rows of each rank, possibly 0, and is the
    same on all ranks.
    """

    rank: int
    size: int
    bytes_sent: dict[str, int]
    """The bytes that this rank had for others, by operation. Each is counted once, however many ranks receive it."""

    @property
    def is_ordered(self) -> bool:
        """Whether every sum is added up in the same order, whatever the shape."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether `all_reduce` of a contiguous tensor on a GPU is computed in place, and a CUDA graph can capture
        it."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, with the same bits on every rank. It may be computed in `x` itself."""
        ...

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks in order of the ranks: [counts[rank], …] -> [sum(counts), …]."""
        ...

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum over all ranks: [sum(counts), …] -> [counts[rank], …].

        The arithmetic is that of `all_reduce`: the ranks' tensors are added up in order of the ranks.
        """
        ...

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send rows to each rank and return those from each rank: [sum(send_counts), …] -> [sum(receive_counts), …],
        both in order of the ranks. The count that one rank sends to another is the one that the other receives."""
        ...

    def gather(self, x: Tensor) -> Tensor | None:
        """Return on rank 0 the tensors of all ranks, concatenated along the last dimension, and None on the others. All
        tensors have the same shape."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's tensor on every rank. It may be written into `x` itself."""
        ...

    def close(self) -> None:
        """Leave the group; harmless when repeated."""
        ...


class SingleRankGroup:
    """A group of one rank. It sends nothing."""

    rank = 0
    size = 1
    is_ordered = True
    is_capturable = True

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


class RehearsalGroup(SingleRankGroup):
    """A group whose other ranks do not exist: it acts as if they had the rows and counts of this one."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        rows = x.new_zeros((max(counts), *x.shape[1:]))
        rows[: len(x)] = x
        return torch.cat([rows[:count] for count in counts])

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return x.split(list(counts))[self.rank].clone()

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        return x.new_zeros((sum(receive_counts), *x.shape[1:]))


def add_in_order(parts: Sequence[Tensor], *, out: Tensor) -> None:
    """Write the sum of the ranks' parts, at least two, to `out`, with the same bits on every rank. bfloat16 and float16
    are added up in float32 and rounded once."""
    if len(parts) > 2 and out.dtype.is_floating_point and out.itemsize < 4:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
    else:  # torch computes the sum of two in float32 and rounds it once
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
