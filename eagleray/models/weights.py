"""The source of a layer's weights, each identified by its name and the shape that the model's configuration implies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagleray.kernels.quantized import Weight

LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
"""Matches the names of a layer's tensors; the group is the layer's number."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The wanted part of a tensor: the indices `span` of its dimension `dim` (0 or 1)."""

    dim: int
    span: range

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the part's shape, given that of the whole tensor."""
        return (*whole[: self.dim], len(self.span), *whole[self.dim + 1 :])


class Weights(Protocol):
    """Loads tensors in the model's dtype, or in the one that is asked for, onto the model's device. The caller owns
    them. Each tensor, or each part of one, is loaded once, from any thread.

    Shapes are those of whole tensors, whatever is cut out of them; only the wanted part is read. Every method raises
    `CheckpointError` if a tensor is missing or has another shape.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        ...

    @property
    def num_parameters(self) -> int:
        """Number of parameters that the tensors loaded so far stand for."""
        ...

    def load(
        self, name: str, shape: tuple[int, ...], cut: Cut | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Load a tensor, or the part `cut` of it."""
        ...

    def load_part(self, name: str, shape: tuple[int, ...], index: int) -> Tensor:
        """Load part `index` of a tensor along its first dimension, of the shape `shape[1:]`."""
        ...

    def load_bytes(self, name: str, shape: tuple[int, ...], index: int, *, parameters: int) -> Tensor:
        """Load part `index` of an encoded uint8 tensor, each byte of which stands for `parameters` parameters."""
        ...

    def load_concatenated(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], cuts: Sequence[Cut | None] | None = None
    ) -> Tensor:
        """Load several tensors, or a part of each, concatenated along the first dimension."""
        ...

    def load_weight(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], cuts: Sequence[Cut | None] | None = None
    ) -> Weight:
        """Load the weights of linear layers, or a part of each, concatenated along the first dimension. They are a
        quantized weight if they are stored so and the backend keeps their format, or if all weights of linear layers
        are to be quantized."""
        ...

    def quantize(self, weight: Tensor) -> Weight:
        """Quantize the weight of a linear layer, if all of them are to be quantized."""
        ...
