"""A backend in plain torch that keeps quantized weights, and decodes them when it makes a product."""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.kernels.backend import Operation
from eagleray.kernels.quantized import LoadedWeight, Weight, WeightFormat, in_blocks
from eagleray.kernels.storage import FunctionWithWeights
from eagleray.kernels.torch.backend import TorchBackend


class KeepingBackend(TorchBackend):
    kept_formats = frozenset((WeightFormat.FP8, WeightFormat.MXFP4))

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.weights: list[Weight] = []
        """The weights of all products."""

    def linear(self, weight: LoadedWeight, bias: Tensor | None) -> Operation:
        self.weights.append(weight := in_blocks(weight))
        return super().linear(weight if isinstance(weight, Tensor) else weight.dequantize(self._dtype), bias)

    def exact_linear(self, weight: Tensor) -> Operation:
        product = super().linear(weight.float(), None)  # not one of `weights`
        return FunctionWithWeights(lambda x: product(x.float()), product.storage())

    def count(self, kind: type) -> int:
        """Return the number of products with a weight of this kind."""
        return sum(isinstance(weight, kind) for weight in self.weights)
