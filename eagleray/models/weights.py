"""The tensors of a checkpoint that a layer declares, and the sources that they are loaded from.

A `Param` is declared by every rank for the whole model; its `shard` is the part that this rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from eagleray.kernels.quantized import LoadedWeight, Weight


@dataclass(frozen=True, slots=True)
class Cut:
    """A shard of a tensor: the indices `span` of its dimension `dim`, rows (0) or columns (1)."""

    dim: int
    span: range

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shard's shape, given that of the whole tensor."""
        return (*whole[: self.dim], len(self.span), *whole[self.dim + 1 :])

    def of(self, whole: Any) -> Tensor:
        """Return the shard of a tensor. Of a tensor in a file only the shard is read."""
        span = slice(self.span.start, self.span.stop)
        part: Tensor = whole[span] if self.dim == 0 else whole[:, span]
        return part


@dataclass(frozen=True, slots=True)
class Part:
    """One part, such as an expert, of a tensor whose first dimension counts the parts."""

    index: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the part's shape, given that of the whole tensor."""
        return whole[1:]

    def of(self, whole: Any) -> Tensor:
        """Return the part of a tensor. Of a tensor in a file only the part is read."""
        part: Tensor = whole[self.index : self.index + 1][0]
        return part


Shard = Cut | Part | None
"""The part of a tensor that this rank has; None: all of it."""


class WeightRole(Enum):
    """Roles of the matrices of a model."""

    FEED_FORWARD = "feed-forward"
    """A projection of a dense layer or of an expert."""
    ATTENTION = "attention"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Param:
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor, which the model's configuration implies."""
    shard: Shard = None
    dtype: torch.dtype | None = None
    """Dtype that it is loaded in; None: the model's. uint8 if it is stored in another encoding."""
    parameters: int = 1
    """Number of parameters that an element stands for."""
    role: WeightRole = WeightRole.FEED_FORWARD
    """Role of a matrix, which decides its format if weights are quantized when they are loaded."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        return self.shape if self.shard is None else self.shard.shape(self.shape)

    @property
    def local_size(self) -> int:
        """Elements of this rank's shard."""
        return torch.Size(self.local_shape).numel()


@dataclass(frozen=True, slots=True, eq=False)
class Alias:
    """Another form in which an update may bring tensors, such as one tensor with all experts."""

    name: str
    shape: tuple[int, ...]
    split: Callable[[Tensor], Iterator[tuple[str, Tensor]]]
    """Yields the names and tensors for which it stands, as views."""


Quantizers = Mapping[WeightRole, Callable[[Tensor], Weight]]
"""Functions that quantize a weight [rows, columns], by its role. Weights of other roles are kept."""


class Weights(Protocol):
    """Loads this rank's shards of tensors onto the model's device, from any thread. The caller owns them.

    Every method raises `CheckpointError` if a tensor is missing or has another shape.
    """

    def load(self, param: Param) -> Tensor:
        """Load one tensor."""
        ...

    def load_concatenated(self, params: Sequence[Param]) -> Tensor:
        """Load several tensors, concatenated along the first dimension."""
        ...

    def load_weight(self, params: Sequence[Param]) -> LoadedWeight:
        """Load the weights of linear layers, concatenated along the first dimension. They are a quantized weight if
        they are stored so and the backend keeps their format, or if all weights of linear layers are to be
        quantized."""
        ...

    def load_head(self, param: Param) -> Weight:
        """Load the weight of the head, a quantized one if it is stored in groups and the backend keeps these."""
        ...

    def quantize(self, weight: Tensor, role: WeightRole = WeightRole.FEED_FORWARD) -> Weight:
        """Quantize a weight, if those of this role are to be quantized."""
        ...
