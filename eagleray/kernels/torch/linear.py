"""Products in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.backend import Operation, OperationWithWeights
from eagleray.kernels.storage import contiguous, memory_of
from eagleray.kernels.torch.adapters import TorchAdapterSite


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

    def adapted(self, site: TorchAdapterSite) -> GatedLinear:
        """Return the same with adapters, which are added before the gate."""
        return GatedLinear(AdaptedLinear(self._product, site), self._gate)


class AdaptedLinear:
    """A product and the adapters that are added to it."""

    def __init__(self, product: OperationWithWeights, site: TorchAdapterSite) -> None:
        self._product = product
        self._site = site

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._product(x)
        self._site.add_to(y, x)
        return y

    def storage(self) -> list[Tensor]:
        return self._product.storage()
