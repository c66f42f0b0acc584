"""Where layers take their weights from: each by its name and the shape that the model's configuration implies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
"""Matches the names of a layer's tensors; the group is the layer's number."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a tensor that is wanted: along its dimension `dim` (0 or 1), the indices in `span`."""

    dim: int
    span: range

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape."""
        return (*whole[: self.dim], len(self.span), *whole[self.dim + 1 :])


class Weights(Protocol):
    """Tensors come in the model's dtype, or the one that is asked for, on its device, and the caller owns them. Each,
    or each part of it, is taken once, from any thread.

    Shapes are those of whole tensors, whatever is cut out of them; only what is wanted is read.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        ...

    @property
    def num_parameters(self) -> int:
        """Elements of all that was taken so far, or what they stand for."""
        ...

    def load(
        self, name: str, shape: tuple[int, ...], cut: Cut | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Raises `CheckpointError` if it is not there or has another shape."""
        ...

    def load_part(self, name: str, shape: tuple[int, ...], index: int) -> Tensor:
        """Part `index` of a tensor, along its first dimension: of the shape `shape[1:]`."""
        ...

    def load_bytes(self, name: str, shape: tuple[int, ...], index: int, *, parameters: int) -> Tensor:
        """As `load_part`, of a tensor of uint8 that means something else; each byte stands for so many parameters."""
        ...

    def load_concatenated(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], cuts: Sequence[Cut | None] | None = None
    ) -> Tensor:
        """Several tensors, or a part of each, one under the other (along the first dimension)."""
        ...
