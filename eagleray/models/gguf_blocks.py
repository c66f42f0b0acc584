"""The blocks of quantized weights in GGUF files: integers whose groups share a scale, and an offset in some types.

The types ending in `_0` and `_1` have blocks of 32 numbers. Those ending in `_K` have blocks of 256 numbers, whose
groups have scales of a few bits, which are multiplied by the block's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagleray.hub.gguf.number_types import TENSOR_TYPES, TensorType
from eagleray.kernels.grouped import Encoding, GroupedWeight

NIBBLE_BIAS = 8
"""Difference of a number of four bits and the integer that `Encoding.INT4` has for it."""
FIVE_BIT_BIAS = 16
"""Difference of a number of five bits and the integer that is kept for it, in eight bits."""


@dataclass(frozen=True, slots=True, eq=False)
class IntegerGroups:
    """Weights [rows, columns]: an integer times its group's scale, plus the group's offset."""

    values: Tensor
    """int8 [rows, columns]"""
    scales: Tensor
    """float16 as stored, or float32 products of two scales [rows, groups]"""
    bits: int
    """4 if the integers are -8 to 7, else 8."""
    offsets: Tensor | None = None
    """float32 [rows, groups]"""

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    def numbers(self) -> Tensor:
        """Return float32 [rows, columns]."""
        numbers = self.values.float().unflatten(1, (-1, self.group_size)) * self.scales.float()[:, :, None]
        if self.offsets is not None:
            numbers += self.offsets[:, :, None]
        return numbers.flatten(1)

    def cut_columns(self, columns: range) -> IntegerGroups | None:
        """Return these columns, or None if they do not begin and end with groups."""
        size = self.group_size
        if columns.start % size or len(columns) % size:
            return None
        groups = slice(columns.start // size, columns.stop // size)
        offsets = None if self.offsets is None else self.offsets[:, groups]
        values = self.values[:, columns.start : columns.stop]
        return IntegerGroups(values, self.scales[:, groups], self.bits, offsets)


def grouped_weight(parts: Sequence[IntegerGroups]) -> GroupedWeight | None:
    """Return weights, one above another, in the format that kernels read; None if that has no code for an integer, or
    if a scale is beyond float16.

    Scales and offsets become float16 in any case, so that the weights of all experts have one layout. This moves a
    number by less than 2 % of the distance of two integers. Small scales are exact, because the product of a float16
    number and an integer is a multiple of float16's smallest number. Parts of different bits and groups all get 8 bits
    and the smallest groups.
    """
    if any(bool((part.values == -128).any()) for part in parts):
        return None
    bits, size = max(part.bits for part in parts), min(part.group_size for part in parts)
    scales = torch.cat([_repeated(part.scales.half(), part.group_size // size) for part in parts])
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = torch.cat([_offsets(part, size) for part in parts])
    if not all(numbers is None or bool(numbers.isfinite().all()) for numbers in (scales, offsets)):
        return None
    encode, encoding = (_codes4, Encoding.INT4) if bits == 4 else (_codes8, Encoding.INT8)
    return GroupedWeight(torch.cat([encode(part.values) for part in parts]), scales, encoding, offsets)


def _offsets(part: IntegerGroups, size: int) -> Tensor:
    offsets = torch.zeros(part.scales.shape) if part.offsets is None else part.offsets
    return _repeated(offsets.half(), part.group_size // size)


def _repeated(numbers: Tensor, times: int) -> Tensor:
    return numbers if times == 1 else numbers.repeat_interleave(times, dim=1)


def _codes4(values: Tensor) -> Tensor:
    return (values + NIBBLE_BIAS).view(torch.uint8)


def _codes8(values: Tensor) -> Tensor:
    """Return magnitudes with the sign as the highest bit."""
    return values.abs().view(torch.uint8) | (values.view(torch.uint8) & 128)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A type of quantized weights."""

    layout: TensorType
    bits: int
    """See `IntegerGroups`."""
    group_size: int
    """Numbers that share a scale."""
    split: Callable[[Tensor], IntegerGroups]
    """Function of the bytes of blocks, uint8 [rows, blocks, block_bytes]."""


def _q8_0(blocks: Tensor) -> IntegerGroups:
    return IntegerGroups(blocks[..., 2:].view(torch.int8).flatten(1), _float16(blocks, 0), 8)


def _q4_0(blocks: Tensor) -> IntegerGroups:
    return IntegerGroups(_nibbles(blocks[..., 2:]).flatten(1), _float16(blocks, 0), 4)


def _q4_1(blocks: Tensor) -> IntegerGroups:
    scales, lowest = _float16(blocks, 0), _float16(blocks, 2).float()
    return IntegerGroups(_nibbles(blocks[..., 4:]).flatten(1), scales, 4, lowest + NIBBLE_BIAS * scales.float())


def _q5_0(blocks: Tensor) -> IntegerGroups:
    values = _with_fifth_bit(_nibbles(blocks[..., 6:]), _bits(blocks[..., 2:6]))
    return IntegerGroups(values.flatten(1), _float16(blocks, 0), 8)


def _q5_1(blocks: Tensor) -> IntegerGroups:
    values = _with_fifth_bit(_nibbles(blocks[..., 8:]), _bits(blocks[..., 4:8]))
    scales, lowest = _float16(blocks, 0), _float16(blocks, 2).float()
    return IntegerGroups(values.flatten(1), scales, 8, lowest + FIVE_BIT_BIAS * scales.float())


def _q4_k(blocks: Tensor) -> IntegerGroups:
    scales, lowest = _scales_of_k(blocks)
    values = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))  # [rows, blocks, 4, 64]
    return IntegerGroups(values.flatten(1), scales.flatten(1), 4, (lowest + NIBBLE_BIAS * scales).flatten(1))


def _q5_k(blocks: Tensor) -> IntegerGroups:
    scales, lowest = _scales_of_k(blocks)
    fifth = torch.stack([(blocks[..., 16:48] >> bit) & 1 for bit in range(8)], dim=-2)  # [rows, blocks, 8, 32]
    values = _with_fifth_bit(_nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2), fifth.flatten(-2))
    return IntegerGroups(values.flatten(1), scales.flatten(1), 8, (lowest + FIVE_BIT_BIAS * scales).flatten(1))


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the lowest numbers of groups, float32 [rows, blocks, 8]."""
    first, second, third = blocks[..., 4:16].split(4, dim=-1)  # six bits of the first groups, then of the others
    factors = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    lowest = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return _float16(blocks, 0).float()[..., None] * factors, _float16(blocks, 2).float()[..., None] * -lowest.float()


def _q6_k(blocks: Tensor) -> IntegerGroups:
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    low = torch.cat((low & 15, low >> 4), dim=-2).unflatten(-1, (2, 32)).flatten(-3, -2)  # [rows, blocks, 2, 4, 32]
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2)
    values = (low | (high << 4)).view(torch.int8) - 32
    factors = blocks[..., 192:208].view(torch.int8)
    scales = _float16(blocks, 208).float()[..., None] * factors
    return IntegerGroups(values.flatten(1), scales.flatten(1), 8)


def _float16(blocks: Tensor, offset: int) -> Tensor:
    """Return a float16 number of each block, [rows, blocks]."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(data: Tensor) -> Tensor:
    """Return int8 -8 to 7 [..., 2 * size]: the lower halves of the bytes [..., size], then the upper ones."""
    return torch.cat((data & 15, data >> 4), dim=-1).view(torch.int8) - NIBBLE_BIAS


def _bits(data: Tensor) -> Tensor:
    """Return the bits of bytes, uint8 [..., 8 * size], the lowest one of each byte first."""
    return torch.stack([(data >> bit) & 1 for bit in range(8)], dim=-1).flatten(-2)


def _with_fifth_bit(nibbles: Tensor, bits: Tensor) -> Tensor:
    """Return int8 -16 to 15, of their lower four bits less `NIBBLE_BIAS`, and the fifth bit."""
    return nibbles + ((bits << 4).view(torch.int8) + (NIBBLE_BIAS - FIVE_BIT_BIAS))


FORMATS = {
    "Q8_0": BlockFormat(TENSOR_TYPES["Q8_0"], 8, 32, _q8_0),
    "Q4_0": BlockFormat(TENSOR_TYPES["Q4_0"], 4, 32, _q4_0),
    "Q4_1": BlockFormat(TENSOR_TYPES["Q4_1"], 4, 32, _q4_1),
    "Q5_0": BlockFormat(TENSOR_TYPES["Q5_0"], 8, 32, _q5_0),
    "Q5_1": BlockFormat(TENSOR_TYPES["Q5_1"], 8, 32, _q5_1),
    "Q4_K": BlockFormat(TENSOR_TYPES["Q4_K"], 4, 32, _q4_k),
    "Q5_K": BlockFormat(TENSOR_TYPES["Q5_K"], 8, 32, _q5_k),
    "Q6_K": BlockFormat(TENSOR_TYPES["Q6_K"], 8, 16, _q6_k),
}
"""The types that are read, by their names."""
