"""Weights of 4 or 8 bits, of which a group of consecutive columns of a row shares a scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

import torch
from torch import Tensor

GROUP_SIZES = (256, 128, 64, 32, 16)
"""Numbers of columns that a group of a packed weight may have."""


class Encoding(Enum):
    """The meaning of codes. A code of 8 bits is the number of a magnitude, with a sign as its highest bit."""

    INT4 = "int4"
    """Code c is the integer c - 8."""
    NF4 = "nf4"
    """Quantiles of the normal distribution, as in QLoRA (arXiv 2305.14314, appendix E)."""
    E2M1 = "e2m1"
    """Numbers of two bits of exponent and one of mantissa, as in MXFP4."""
    INT8 = "int8"
    """Magnitudes 0 to 127."""
    HALF_INT8 = "half_int8"
    """Magnitudes 0.5 to 127.5: with an offset of half a scale, all 256 integers of 8 bits."""
    E4M3 = "e4m3"
    """Numbers of torch's float8_e4m3fn."""

    @property
    def bits(self) -> int:
        return 4 if self in (Encoding.INT4, Encoding.NF4, Encoding.E2M1) else 8


E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the lower three bits; the fourth bit is the sign."""

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@cache
def value_table(encoding: Encoding) -> Tensor:
    """Return the values of codes in bfloat16: [16] of 4 bits, or [128] magnitudes of 8 bits."""
    match encoding:
        case Encoding.INT4:
            values = torch.arange(-8, 8)
        case Encoding.NF4:
            values = torch.tensor(NF4_VALUES)
        case Encoding.E2M1:
            values = torch.tensor([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)])
        case Encoding.INT8:
            values = torch.arange(128)
        case Encoding.HALF_INT8:
            values = torch.arange(128) + 0.5
        case Encoding.E4M3:
            values = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return values.to(torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """Weights [rows, columns]: the scale of a group times the values of codes, plus the group's offset."""

    codes: Tensor
    """uint8 [rows, columns], one code in each byte"""
    scales: Tensor
    """float16, bfloat16 or float32 [rows, columns / size of a group]"""
    encoding: Encoding
    offsets: Tensor | None = None
    """of the dtype and shape of the scales"""
    columns_per_divisor: int | None = None
    """columns whose scales, in float16, are multiples of one number by -15 to 15; None: those of a group, which have
    one scale anyway"""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [rows, columns], rounded once, to `dtype`."""
        table = value_table(self.encoding).to(self.codes.device).float()
        if self.encoding.bits == 8:
            table = torch.cat((table, -table))
        numbers = table.index_select(0, self.codes.flatten().int()).view(*self.scales.shape, self.group_size)
        numbers = numbers * self.scales.float()[:, :, None]
        if self.offsets is not None:
            numbers += self.offsets.float()[:, :, None]
        return numbers.flatten(1).to(dtype)

    def select_rows(self, order: Tensor) -> GroupedWeight:
        """Return the rows `order`, int64."""
        offsets = None if self.offsets is None else self.offsets[order]
        return replace(self, codes=self.codes[order], scales=self.scales[order], offsets=offsets)
