"""Weights of few bits for the CPU kernels: their packing, quantization, and the C structs that describe them.

Formats of checkpoints become groups, see `csrc/grouped.h`, without a change of any number.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.grouped import GROUP_SIZES, Encoding, GroupedWeight, value_table
from eagleray.kernels.quantized import (
    FP8_COLUMNS,
    MXFP4_SCALE_BIAS,
    Fp8Weight,
    Mxfp4Weight,
    QuantizedWeight,
    WeightFormat,
)

SCALE_KINDS = {
    torch.float16: abi.SCALE_FLOAT16,
    torch.bfloat16: abi.SCALE_BFLOAT16,
    torch.float32: abi.SCALE_FLOAT32,
}

INT4_COLUMNS = 32
"""Columns of a group in a weight that is quantized to 4 bits when it is loaded."""
BLOCK_SIZES = (256, 128, 64, 32)
"""Columns of a group in a weight that is quantized to 8 bits when it is loaded, or of the groups of 4 bits whose scales
are multiples of one number. The largest that divides a weight is taken."""
HEAD_COLUMNS = 64
"""Most columns of a group of 8 bits in the head, whose errors show in every logit."""
ENCODINGS = {WeightFormat.INT4: Encoding.INT4, WeightFormat.INT8: Encoding.HALF_INT8}
"""The formats that weights can be quantized to in groups."""
INTEGERS = frozenset({Encoding.INT4, Encoding.INT8, Encoding.HALF_INT8})
"""Encodings whose values are consecutive integers, or all half above integers."""


@dataclass(frozen=True)
class Grouping:
    """The layout of a packed weight of few bits. Weights of one layout are exchangeable."""

    encoding: Encoding
    size: int
    """Columns of a group."""
    scale_dtype: torch.dtype
    has_offsets: bool
    block: int
    """Columns whose scales are multiples of one number; those of a group, if others are not."""

    @cached_property
    def c(self) -> CStruct:
        """The layout as a C struct, which lives as long as this object."""
        return abi.CGrouping(
            bits=self.encoding.bits,
            size=self.size,
            scale_kind=SCALE_KINDS[self.scale_dtype],
            has_offsets=self.has_offsets,
            block=self.block,
            are_integers=self.encoding in INTEGERS,
            values=value_table(self.encoding).data_ptr(),
        )

    @property
    def pointer(self) -> ctypes._Pointer[CStruct]:
        return ctypes.pointer(self.c)


@cache
def grouping_of(encoding: Encoding, size: int, scale_dtype: torch.dtype, has_offsets: bool, block: int) -> Grouping:
    """Return the layout of a weight, one object for each layout."""
    return Grouping(encoding, size, scale_dtype, has_offsets, block)


def pack(library: ctypes.CDLL, weight: GroupedWeight, out: Tensor, *, inner: int = 0) -> None:
    """Pack a weight whose group size is one of `GROUP_SIZES` into `out`, uint8. `inner`: see `er_pack_grouped`."""
    scales, codes = weight.scales.contiguous(), weight.codes.contiguous()
    offsets = None if weight.offsets is None else weight.offsets.contiguous()
    library.er_pack_grouped(
        layout(weight).c,
        codes.data_ptr(),
        scales.data_ptr(),
        None if offsets is None else offsets.data_ptr(),
        *codes.shape,
        inner,
        out.data_ptr(),
        1,
    )


def layout(weight: GroupedWeight) -> Grouping:
    block = weight.columns_per_divisor or weight.group_size
    return grouping_of(weight.encoding, weight.group_size, weight.scales.dtype, weight.offsets is not None, block)


def packed_size(library: ctypes.CDLL, grouping: Grouping, n: int, k: int) -> int:
    """Return the bytes of a packed weight of n outputs and k inputs."""
    size: int = library.er_grouped_size(grouping.c, n, k)
    return size


def quantize(
    library: ctypes.CDLL, weight: Tensor, kind: WeightFormat, *, is_head: bool = False
) -> GroupedWeight | Tensor:
    """Return a weight [rows, columns] in groups, or the weight itself if no block size divides it."""
    rows, columns = weight.shape
    most = HEAD_COLUMNS if is_head else columns
    block = next((size for size in BLOCK_SIZES if size <= most and columns % size == 0), None)
    if block is None:
        return weight
    encoding, plain = ENCODINGS[kind], weight.contiguous()
    size = INT4_COLUMNS if kind is WeightFormat.INT4 else block
    codes = torch.empty(plain.shape, dtype=torch.uint8)
    scales = torch.empty((rows, columns // size), dtype=torch.float16)
    offsets = torch.empty_like(scales) if encoding is Encoding.HALF_INT8 else None
    is_bfloat16 = int(plain.dtype == torch.bfloat16)
    library.er_quantize(
        *(plain.data_ptr(), rows, columns, encoding.bits, size, block),
        *(codes.data_ptr(), scales.data_ptr(), None if offsets is None else offsets.data_ptr(), is_bfloat16, 1),
    )
    return GroupedWeight(codes, scales, encoding, offsets, columns_per_divisor=block if block > size else None)


def in_groups(weight: QuantizedWeight) -> GroupedWeight | None:
    """Return a quantized weight in groups of one of `GROUP_SIZES`, or None if its blocks cannot be divided so."""
    match weight:
        case Fp8Weight():
            return _of_fp8(weight)
        case Mxfp4Weight():
            return _of_mxfp4(weight)
        case GroupedWeight():
            return _in_smaller_groups(weight)


def _of_fp8(weight: Fp8Weight) -> GroupedWeight | None:
    rows, columns = weight.shape
    high, wide = weight.block
    # Not more: with matrix instructions, blocks are decoded ahead of their use if several of them are kept.
    size = _group_size(columns, min(wide, FP8_COLUMNS))
    if size is None:
        return None
    firsts = torch.arange(0, columns, size) // wide  # the block in which each group lies
    scales = weight.scales.repeat_interleave(high, dim=0)[:rows, firsts]
    return GroupedWeight(weight.values.view(torch.uint8), scales, Encoding.E4M3)


def _of_mxfp4(weight: Mxfp4Weight) -> GroupedWeight:
    codes = torch.stack((weight.blocks & 15, weight.blocks >> 4), dim=-1).flatten(1)
    powers = torch.ldexp(torch.ones(weight.scales.shape), weight.scales.int() - MXFP4_SCALE_BIAS)
    return GroupedWeight(codes, powers.to(torch.bfloat16), Encoding.E2M1)


def _in_smaller_groups(weight: GroupedWeight) -> GroupedWeight | None:
    columns, stored = weight.shape[1], weight.group_size
    if stored * weight.scales.shape[1] != columns or (size := _group_size(columns, stored)) is None:
        return None
    if size == stored:
        return weight
    repeats = stored // size
    offsets = None if weight.offsets is None else weight.offsets.repeat_interleave(repeats, dim=1)
    return GroupedWeight(weight.codes, weight.scales.repeat_interleave(repeats, dim=1), weight.encoding, offsets)


def _group_size(columns: int, stored: int) -> int | None:
    """Return the largest size of groups that divides columns and stored groups."""
    common = math.gcd(columns, min(stored, columns))
    return next((size for size in GROUP_SIZES if common % size == 0), None)
