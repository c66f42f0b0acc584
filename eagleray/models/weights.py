"""Where layers take their weights from: each by its name and the shape that the model's configuration implies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["Weights"]


class Weights(Protocol):
    """Tensors come in the model's dtype on its device, and the caller owns them. Each is taken once."""

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors taken so far."""
        ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises `CheckpointError` if it is not there or has another shape."""
        ...

    def take_rows(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Several tensors, one under the other (along the first dimension)."""
        ...
