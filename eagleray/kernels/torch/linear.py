"""Products in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.backend import Operation


class PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def storage(self) -> list[Tensor]:
        """Return the memory of the weights, which may be overwritten: one-dimensional uint8 tensors."""
        self._weight = self._weight.contiguous()
        return [part.view(torch.uint8).view(-1) for part in (self._weight, self._bias) if part is not None]


class GatedLinear:
    """A product and the gate that is applied to its outputs."""

    def __init__(self, product: Operation, gate: Operation) -> None:
        self.product = product
        self._gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        return self._gate(self.product(x))


def plain_product(operation: Operation) -> PlainLinear | None:
    """Return the product of a linear or gated linear operation if its weights can be overwritten."""
    product = operation.product if isinstance(operation, GatedLinear) else operation
    return product if isinstance(product, PlainLinear) else None
