"""Products in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.backend import Operation, OperationWithWeights
from eagleray.kernels.storage import contiguous, memory_of


class PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.contiguous()
        self._bias = contiguous(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def storage(self) -> list[Tensor]:
        return memory_of(self._weight, self._bias)


class GatedLinear:
    """A product and the gate that is applied to its outputs."""

    def __init__(self, product: OperationWithWeights, gate: Operation) -> None:
        self._product = product
        self._gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        return self._gate(self._product(x))

    def storage(self) -> list[Tensor]:
        return self._product.storage()
