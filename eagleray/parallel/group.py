"""The operations between the ranks that share every layer, a tensor-parallel group."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["OPERATION_SECONDS", "Alone", "Group"]

OPERATION_SECONDS = 600.0
"""How long an operation waits for the other ranks. They may be in a step that takes long; a rank that ended is noticed
by the engine, much earlier."""


class Group(Protocol):
    """Every rank makes the same calls in the same order, with the same shapes and dtypes.

    A call raises `DeadlineExceeded` if the others do not make it too, and `ChannelClosed` if one of them is gone and
    that can be noticed here; the group is of no use then.
    """

    rank: int
    size: int

    @property
    def is_ordered(self) -> bool:
        """Whether every sum is added up in the same order, whatever the shape."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on every rank; may be computed in `x` itself."""
        ...

    def gather(self, x: Tensor) -> Tensor | None:
        """On rank 0 the tensors of all ranks, one after another along the last dimension; None on the others."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """What rank 0 has, on every rank; may be written into `x` itself."""
        ...

    def close(self) -> None:
        """Leave the group; harmless when repeated."""
        ...


class Alone:
    """A group of one."""

    rank = 0
    size = 1
    is_ordered = True

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def close(self) -> None:
        pass
