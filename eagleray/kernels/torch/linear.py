"""Products in plain torch, whose weights can be read and overwritten (see `experts.Stored`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], Tensor]


class PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def storage(self) -> list[Tensor]:
        """See `experts.Stored`."""
        self._weight = self._weight.contiguous()
        return [part.view(torch.uint8).view(-1) for part in (self._weight, self._bias) if part is not None]


class GatedLinear:
    """A product whose first half gates the second half: `gate` takes both."""

    def __init__(self, product: Function, gate: Function) -> None:
        self._product = product
        self._gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        return self._gate(self._product(x))


class StoredGatedLinear(GatedLinear):
    """Of a product whose weights can be overwritten."""

    def __init__(self, product: PlainLinear, gate: Function) -> None:
        super().__init__(product, gate)
        self.storage = product.storage
