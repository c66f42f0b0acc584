"""Weights that are kept in fewer bits than the numbers that they are multiplied with.

`dequantize` defines their numbers: products with them equal products with the dequantized weights, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MXFP4_BLOCK = 32
"""Numbers that share a scale."""

MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the lower three bits; the fourth bit is the sign."""
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
