"""Weights of products and embeddings as torch and the Triton kernels read them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.params import ClampedSwiglu
from eagleray.kernels.recording import EmbeddingTable, LinearWeight
from eagleray.kernels.torch.functional import clamped_swiglu, silu_and_mul


class CudaLinear(LinearWeight):
    """A weight [out_features, in_features]. If it is gated, the first half of the outputs are gates.

    `is_float32`: the product is computed in float32, the weight is float32, and inputs are converted first.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        is_gated: bool = False,
        clamp: ClampedSwiglu | None = None,
        is_float32: bool = False,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.is_gated = is_gated
        self.clamp = clamp
        self.is_float32 = is_float32
        self.size = len(weight) // 2 if is_gated else len(weight)
        self.stack: tuple[Tensor, Tensor | None] | None = None
        """Weights and biases of all expert slots, if these are views of them."""

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Write the product, without the gate, to `out` [rows, out_features]. Both are of the weight's dtype."""
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)

    def __call__(self, x: Tensor) -> Tensor:
        product = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        if not self.is_gated:
            return product
        return silu_and_mul(product) if self.clamp is None else clamped_swiglu(product, self.clamp)


class CudaEmbedding(EmbeddingTable):
    """The vectors [num_own, size] of the tokens from id `first` on."""

    def __init__(self, weight: Tensor, first: int) -> None:
        self.weight = weight
        self.first = first
        self.size = weight.shape[1]
