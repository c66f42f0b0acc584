"""Weights that are kept in fewer bits than the numbers that they are multiplied with.

`dequantize` defines their numbers: products with them equal products with the dequantized weights, up to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.grouped import E2M1_MAGNITUDES, GroupedWeight


class WeightFormat(StrEnum):
    """The formats of quantized weights."""

    FP8 = "fp8"
    MXFP4 = "mxfp4"
    INT8 = "int8"
    INT4 = "int4"


FP8_COLUMNS = 128
"""Number of consecutive columns that share a scale, and that products read at a time."""
FP8_BLOCK = (128, FP8_COLUMNS)
"""Rows and columns that share a scale in a weight that is quantized when it is loaded."""
MAX_FP8 = 448.0
"""Largest number of float8_e4m3fn."""

MXFP4_BLOCK = 32
"""Numbers that share a scale."""

MXFP4_VALUES = E2M1_MAGNITUDES
MXFP4_SCALE_BIAS = 127


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """Weights [..., rows, columns] in float8 with a scale for each block; blocks at the edges may be partial."""

    values: Tensor
    """float8_e4m3fn [..., rows, columns]"""
    scales: Tensor
    """float32 [..., blocks of rows, blocks of columns]"""
    block: tuple[int, int]
    """Rows and columns of a block. One scale per row is (1, columns)."""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [..., rows, columns], rounded once, to `dtype`."""
        rows, columns = self.shape[-2:]
        scales = self.scales.repeat_interleave(self.block[0], dim=-2)[..., :rows, :]
        scales = scales.repeat_interleave(self.block[1], dim=-1)[..., :columns]
        return (self.values.float() * scales).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Weight:
    """Weights [..., rows, columns] in the four bits of the OCP Microscaling Formats v1.0: blocks of 32 numbers E2M1
    that share a scale E8M0."""

    blocks: Tensor
    """uint8 [..., rows, columns / 32, 16], with two numbers in each byte, the first one in its lower half"""
    scales: Tensor
    """uint8 [..., rows, columns / 32]: powers of two, with a bias of 127"""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.scales.shape[:-1], self.scales.shape[-1] * MXFP4_BLOCK))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [..., rows, columns] as `dtype`."""
        values = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)], device=self.blocks.device)
        halves = torch.stack((self.blocks & 15, self.blocks >> 4), dim=-1)  # [..., columns / 32, 16, 2]
        numbers = values[halves.int()].flatten(-2)
        return torch.ldexp(numbers, self.scales.int()[..., None] - MXFP4_SCALE_BIAS).to(dtype).flatten(-2)


@dataclass(frozen=True, slots=True, eq=False)
class RowParts:
    """A weight [rows, columns] whose rows are in several contiguous tensors, one after another."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(map(len, self.parts)), self.parts[0].shape[1]))


QuantizedWeight = Fp8Weight | Mxfp4Weight | GroupedWeight

BlockWeight = Tensor | Fp8Weight | Mxfp4Weight
"""A weight in a format that GPUs keep."""

Weight = Tensor | QuantizedWeight
"""A weight [rows, columns] of a product: a tensor of the model's dtype, or a quantized weight."""

LoadedWeight = Weight | RowParts
"""A weight before a backend has packed it."""


def in_blocks(weight: LoadedWeight) -> BlockWeight:
    """Return a weight that is neither in parts nor in groups because the backend does not take them."""
    assert not isinstance(weight, RowParts), "weights are concatenated for a backend that does not take parts"
    assert not isinstance(weight, GroupedWeight), "weights are decoded for a backend that does not keep their format"
    return weight


def unquantized(weight: LoadedWeight) -> Tensor:
    """Return a weight that must be a tensor because the backend's `kept_formats` are empty."""
    assert isinstance(weight, Tensor), "weights are decoded for a backend that does not keep their format"
    return weight


def quantize_fp8(weight: Tensor, block: tuple[int, int] = FP8_BLOCK) -> Fp8Weight:
    """Return a weight [rows, columns] in FP8. The largest number of each block becomes the largest of float8."""
    (rows, columns), (high, wide) = weight.shape, block
    padded = F.pad(weight.float(), (0, -columns % wide, 0, -rows % high))
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))  # [row blocks, high, column blocks, wide]
    scales = blocks.abs().amax(dim=(1, 3)) / MAX_FP8
    scales.clamp_min_(torch.finfo(torch.float32).tiny)  # a block of zeros
    values = (blocks / scales[:, None, :, None]).view(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn)
    return Fp8Weight(values.contiguous(), scales, block)


def select_rows(weight: Fp8Weight, order: Tensor) -> Fp8Weight:
    """Return the rows `order`, int64 on any device, of a weight [rows, columns]."""
    order = order.to(weight.values.device)
    values = weight.values.view(torch.uint8)[order].view(torch.float8_e4m3fn)
    scales, rows = group_scales(weight.scales, order // weight.block[0], weight.block[0])
    return Fp8Weight(values, scales, (rows, weight.block[1]))


def group_scales(scales: Tensor, places: Tensor, block_rows: int) -> tuple[Tensor, int]:
    """Return scales for a weight whose row r has the scales `scales[places[r]]`, and the number of rows that share
    them: the largest divisor of `block_rows` for which all rows of each block are alike."""
    changes = (places[1:] != places[:-1]).nonzero().flatten() + 1
    rows = math.gcd(block_rows, *changes.tolist())
    return scales[places[::rows]].contiguous(), rows
