"""Weights of products and embeddings as torch and the Triton kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.cuda.triton.linear import quantized_gated_linear, quantized_linear
from eagleray.kernels.cuda.triton.tile_product import pad_scales
from eagleray.kernels.params import ClampedSwiglu
from eagleray.kernels.quantized import BlockWeight, Fp8Weight, Mxfp4Weight
from eagleray.kernels.recording import EmbeddingTable, LinearWeight
from eagleray.kernels.storage import contiguous, memory_of
from eagleray.kernels.torch.functional import clamped_swiglu, silu_and_mul


class CudaLinear(LinearWeight):
    """A weight [out_features, in_features], which this object owns. If it is gated, the first half of the outputs are
    gates.

    `is_float32`: the product is computed in float32, the weight is float32, and inputs are converted first.
    """

    def __init__(
        self,
        weight: BlockWeight,
        bias: Tensor | None,
        *,
        is_gated: bool = False,
        clamp: ClampedSwiglu | None = None,
        is_float32: bool = False,
    ) -> None:
        self.weight = _packed(weight)
        self.bias = contiguous(bias)
        self.is_gated = is_gated
        self.clamp = clamp
        self.is_float32 = is_float32
        self.size = weight.shape[0] // 2 if is_gated else weight.shape[0]
        self.stack: tuple[BlockWeight, Tensor | None] | None = None
        """Weights and biases of all expert slots, if these are views of them."""

    def storage(self) -> list[Tensor]:
        return memory_of(*weight_memory(self.weight), self.bias)

    @property
    def applies_gate(self) -> bool:
        """Whether `multiply` applies the gate too."""
        return self.is_gated and not isinstance(self.weight, Tensor)

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Write the product, without the gate unless `applies_gate`, to `out` [rows, out_features]. Both are of the
        weight's dtype, or with a quantized weight of the model's."""
        if self.applies_gate:
            quantized_gated_linear(x, self.weight, self.bias, self.clamp, out=out)
        else:
            self.multiply_without_gate(x, out)

    def multiply_without_gate(self, x: Tensor, out: Tensor) -> None:
        """Write the product to `out` [rows, out_features], also if it is gated."""
        if not isinstance(self.weight, Tensor):
            quantized_linear(x, self.weight, self.bias, out=out)
        elif self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)

    def __call__(self, x: Tensor) -> Tensor:
        if not isinstance(self.weight, Tensor):
            out = x.new_empty((len(x), self.size))
            if len(x):
                self.multiply(x.contiguous(), out)
            return out
        product = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        if not self.is_gated:
            return product
        return silu_and_mul(product) if self.clamp is None else clamped_swiglu(product, self.clamp)


def stack_weights(weights: Sequence[BlockWeight]) -> BlockWeight:
    """Return weights [slots, rows, columns] of the packed weights of all slots, which are of one format and shape."""
    first = weights[0]
    if isinstance(first, Fp8Weight):
        fp8 = [weight for weight in weights if isinstance(weight, Fp8Weight) and weight.block == first.block]
        values = torch.stack([weight.values.view(torch.uint8) for weight in fp8]).view(torch.float8_e4m3fn)
        stacked: BlockWeight = Fp8Weight(values, torch.stack([weight.scales for weight in fp8]), first.block)
    elif isinstance(first, Mxfp4Weight):
        mxfp4 = [weight for weight in weights if isinstance(weight, Mxfp4Weight)]
        scales = pad_scales(torch.stack([weight.scales for weight in mxfp4]))
        stacked = Mxfp4Weight(torch.stack([weight.blocks for weight in mxfp4]), scales)
    else:
        stacked = torch.stack([weight for weight in weights if isinstance(weight, Tensor)])
    assert stacked.shape[0] == len(weights), "the experts of a layer have weights of one format"
    return stacked


def slot_weight(stacked: BlockWeight, slot: int) -> BlockWeight:
    """Return the weight of a slot, a view of `stack_weights`."""
    if isinstance(stacked, Fp8Weight):
        return Fp8Weight(stacked.values[slot], stacked.scales[slot], stacked.block)
    if isinstance(stacked, Mxfp4Weight):
        return Mxfp4Weight(stacked.blocks[slot], stacked.scales[slot])
    return stacked[slot]


def weight_memory(weight: BlockWeight) -> list[Tensor]:
    """Return the tensors that a packed weight consists of, contiguous and with any padding."""
    if isinstance(weight, Fp8Weight):
        return [weight.values, weight.scales]
    if isinstance(weight, Mxfp4Weight):
        scales = weight.scales
        return [weight.blocks, scales.as_strided((*scales.shape[:-1], scales.stride(-2)), scales.stride())]
    return [weight]


def _packed(weight: BlockWeight) -> BlockWeight:
    """Return the weight in the layout that products need."""
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(weight.values.contiguous(), weight.scales.contiguous(), weight.block)
    if isinstance(weight, Mxfp4Weight):
        return Mxfp4Weight(weight.blocks.contiguous(), pad_scales(weight.scales))
    return weight.contiguous()


class CudaEmbedding(EmbeddingTable):
    """The vectors [num_own, size] of the tokens from id `first` on."""

    def __init__(self, weight: Tensor, first: int) -> None:
        self.weight = weight.contiguous()
        self.first = first
        self.size = weight.shape[1]

    def storage(self) -> list[Tensor]:
        return memory_of(self.weight)
