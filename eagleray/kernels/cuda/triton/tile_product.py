"""Products of a tile of a weight with a tile of rows: the part that all products with Triton share.

A program computes `weight[rows] @ x[tokens].T`, with the weight as the left operand. Then a tile has 64 or 128 rows of
the weight and only 16 tokens or more, as wanted for a few tokens and by the tensor cores of Hopper, which take a left
operand in quantized form from registers, where it is decoded.

A weight is a tensor of the model's dtype, an `Fp8Weight`, or an `Mxfp4Weight`, with rows of outputs. Gated products
take their gates and the values behind them from `[gates; values]` (two halves of the rows) or from rows that alternate
(gate, value, gate, ...), as gpt-oss stores them; biases have the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagleray.kernels.cuda.triton.gate import apply_gate
from eagleray.kernels.quantized import MXFP4_BLOCK, BlockWeight, Fp8Weight

PLAIN = tl.constexpr(0)
FP8 = tl.constexpr(1)
MXFP4 = tl.constexpr(2)

SCALES_PER_WORD = 4
"""Scales of an `Mxfp4Weight` that a program reads at a time: those of 128 numbers."""

NATIVE_FP8 = (8, 9)
"""Compute capability from which on the device converts float8."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Sizes of a product's tiles. A result does not depend on them: each sum has one order, that of the features."""

    tokens: int
    rows: int
    """Rows of the weight."""
    features: int
    """Features that are multiplied at a time."""
    num_warps: int
    num_stages: int
    """Tiles of features that are on their way from memory, plus one."""

    @property
    def constants(self) -> dict[str, int]:
        """The sizes that a kernel is compiled for."""
        return {"TOKENS": self.tokens, "ROWS": self.rows, "FEATURES": self.features}


def tile_config(tokens: int, weight: BlockWeight, dtype: torch.dtype) -> TileConfig:
    """Return the sizes for a product with tiles of 16, 32, 64 or 128 tokens."""
    if dtype == torch.float32:  # multiplied without tensor cores
        return TileConfig(tokens, 32, 32, num_warps=4, num_stages=2)
    if isinstance(weight, Tensor):
        if tokens <= 32:
            return TileConfig(tokens, 64, 128, num_warps=4, num_stages=4)
        return TileConfig(tokens, 128, 64, num_warps=4 if tokens == 64 else 8, num_stages=4)
    if tokens <= 32:
        return TileConfig(tokens, 64, 128, num_warps=4, num_stages=5)
    return TileConfig(tokens, 128, 128, num_warps=8, num_stages=3)


@dataclass(frozen=True, slots=True, eq=False)
class WeightOperand:
    """A weight as the kernels take it."""

    values: Tensor
    scales: Tensor
    """A tensor that is not used if there are no scales."""
    constants: dict[str, int]

    @classmethod
    def of(cls, weight: BlockWeight) -> Self:
        """Return the operand, which points to the memory of `weight`, of any number of dimensions."""
        *_, rows, columns = weight.shape
        assert rows * columns < 1 << 31, "offsets in a matrix are computed in int32"
        sizes = {"N": rows, "K": columns}
        if isinstance(weight, Tensor):
            assert weight.is_contiguous()
            return cls(weight, weight, sizes | scale_constants(PLAIN))
        if isinstance(weight, Fp8Weight):
            assert weight.values.is_contiguous() and weight.scales.is_contiguous()
            num_blocks = -(-rows // weight.block[0]), -(-columns // weight.block[1])
            assert weight.scales.shape[-2:] == num_blocks
            # a tile of features lies within a block of columns
            assert weight.block[1] >= columns or weight.block[1] % 128 == 0
            constants = scale_constants(FP8, *weight.block, num_blocks[1], num_blocks[0] * num_blocks[1])
            return cls(_fp8_values(weight.values), weight.scales, sizes | constants)
        assert weight.blocks.is_contiguous()
        words = _scale_words(weight.scales)
        constants = scale_constants(MXFP4, 1, MXFP4_BLOCK, words.shape[-1], rows * words.shape[-1])
        return cls(weight.blocks, words, sizes | constants)


def scale_constants(
    kind: tl.constexpr, block_rows: int = 1, block_columns: int = 1, stride: int = 1, size: int = 1
) -> dict[str, int]:
    """Return the constants of a weight's format. `stride` is the length of a row of scales, `size` their number in a
    slot."""
    return {
        "FORMAT": kind.value,
        "PER_ELEMENT": 2 if kind.value == MXFP4.value else 1,  # numbers of an element
        "SCALE_ROWS": block_rows,
        "SCALE_COLUMNS": block_columns,
        "SCALE_STRIDE": stride,
        "SCALE_SIZE": size,
    }


def _fp8_values(values: Tensor) -> Tensor:
    is_native = values.is_cuda and torch.cuda.get_device_capability(values.device) >= NATIVE_FP8
    return values if is_native else values.view(torch.uint8)


def _scale_words(scales: Tensor) -> Tensor:
    """Return int32 words of scales [..., rows, words], the last of which may contain bytes that are no scales."""
    stride = scales.stride(-2)
    assert stride % SCALES_PER_WORD == 0, "the rows of the scales are whole words, see pad_scales"
    words = scales.as_strided((*scales.shape[:-1], stride), scales.stride()).view(torch.int32)
    assert words.is_contiguous()
    return words


def pad_scales(scales: Tensor) -> Tensor:
    """Return the scales of an `Mxfp4Weight` in rows of whole words, as products need them, with zeros in between."""
    *leading, columns = scales.shape
    padded = scales.new_zeros((*leading, -(-columns // SCALES_PER_WORD) * SCALES_PER_WORD))
    padded[..., :columns] = scales
    return padded[..., :columns]


@triton.jit
def weight_rows(rows, N: tl.constexpr, GATED: tl.constexpr):
    """Return the rows of the weight that are computed at the places `rows`: a gate, its value, the next gate, ..."""
    if GATED:
        return rows // 2 + (rows % 2) * (N // 2)
    return rows


@triton.jit
def multiply_tile(
    values,
    scales,
    rows,
    is_row,
    x,
    is_token,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
):
    """Return float32 [ROWS, TOKENS]. `values` and `scales` point to a weight, `x` [TOKENS] to the rows of tokens.
    Nothing is read for places without a row or a token, whose results are not to be used."""
    dtype: tl.constexpr = x.dtype.element_ty
    # A large scale of MXFP4 times the power of two that decodes its numbers would be infinite, so the tile is computed
    # smaller: numbers below 2^-62 become 0 instead. float16 has neither room for that nor those scales.
    SHIFT: tl.constexpr = 0 if dtype == tl.float16 else 64
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, K, FEATURES):
        columns = start + tl.arange(0, FEATURES)
        own = tl.load(x[:, None] + columns[None, :], mask=is_token[:, None] & (columns[None, :] < K), other=0.0)
        if FORMAT == PLAIN:
            is_inside = is_row[:, None] & (columns[None, :] < K)
            weight = tl.load(values + rows[:, None] * K + columns[None, :], mask=is_inside, other=0.0)
        elif FORMAT == FP8:
            weight = _load_fp8(
                values, scales, rows, is_row, start, dtype, FEATURES, K, SCALE_ROWS, SCALE_COLUMNS, SCALE_STRIDE
            )
        else:
            weight = _load_mxfp4(values, scales, rows, is_row, start, dtype, ROWS, FEATURES, K, SCALE_STRIDE, SHIFT)
        total = tl.dot(weight, own.T, total, input_precision="ieee")
    if FORMAT == MXFP4:
        total *= 2.0**SHIFT
    return total


@triton.jit
def _load_fp8(
    values,
    scales,
    rows,
    is_row,
    start,
    dtype: tl.constexpr,
    FEATURES: tl.constexpr,
    K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
):
    """Return the numbers [rows, FEATURES] from column `start` on, in `dtype`."""
    columns = start + tl.arange(0, FEATURES)
    is_inside = is_row[:, None] & (columns[None, :] < K)
    scale_place = rows // SCALE_ROWS * SCALE_STRIDE + start // SCALE_COLUMNS
    factors = tl.load(scales + scale_place, mask=is_row, other=0.0)
    if values.dtype.element_ty == tl.uint8:
        stored = tl.load(values + rows[:, None] * K + columns[None, :], mask=is_inside, other=0).to(tl.int16)
        # with the bits of e4m3 at the same place, and the exponent's bias of 15 in place of 7, a float16 is the number
        # divided by 2^8; this holds for subnormal numbers too
        numbers = (((stored & 0x80) << 8) | ((stored & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
        factors *= 256.0
    else:
        numbers = tl.load(values + rows[:, None] * K + columns[None, :], mask=is_inside, other=0.0).to(tl.float32)
    return (numbers * factors[:, None]).to(dtype)


@triton.jit
def _load_mxfp4(
    values,
    scales,
    rows,
    is_row,
    start,
    dtype: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    K: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return the numbers [ROWS, FEATURES] from column `start` on, divided by 2^SHIFT, in `dtype`."""
    GROUPS: tl.constexpr = FEATURES // 32
    places = start // 2 + tl.arange(0, FEATURES // 2)
    is_inside = is_row[:, None] & (places[None, :] < K // 2)
    pairs = tl.load(values + rows[:, None] * (K // 2) + places[None, :], mask=is_inside, other=0).to(tl.int32)
    words = tl.load(scales + rows * SCALE_STRIDE + start // 128, mask=is_row, other=0)
    exponents = _scales_of_words(words, start, GROUPS)
    # With the bits of E2M1 at this place a float32 is the number times 2^-126, also where it is subnormal, so the power
    # of the scale, 2^(exponent - 127), grows by 126. `multiply_tile` takes a part of that.
    field = exponents + (126 - SHIFT)
    # Finite in any case, because bytes that are no scales are multiplied with numbers that are 0.
    factors = (tl.where(field > 254, 254, field) << 23).to(tl.float32, bitcast=True)
    factors = tl.reshape(tl.broadcast_to(factors[:, :, None], (ROWS, GROUPS, 16)), (ROWS, FEATURES // 2))
    low = ((pairs & 0x7) << 22) | ((pairs & 0x8) << 28)
    high = ((pairs & 0x70) << 18) | ((pairs & 0x80) << 24)
    low = (low.to(tl.float32, bitcast=True) * factors).to(dtype)
    high = (high.to(tl.float32, bitcast=True) * factors).to(dtype)
    return tl.reshape(tl.join(low, high), (ROWS, FEATURES))


@triton.jit
def _scales_of_words(words, start, GROUPS: tl.constexpr):
    """Return the bytes [rows, GROUPS] of words that have the scales of 128 numbers each, from number `start` on.

    The compiler decodes in the registers that the tensor cores read only if no value depends on its position, so bytes
    are joined instead of being shifted by a range.
    """
    tl.static_assert(GROUPS == 4 or GROUPS == 1)
    if GROUPS == 4:
        even = tl.join(words & 0xFF, (words >> 16) & 0xFF)
        odd = tl.join((words >> 8) & 0xFF, (words >> 24) & 0xFF)
        result = tl.reshape(tl.join(even, odd), (words.shape[0], 4))
    else:
        result = ((words >> (start % 128 // 32 * 8)) & 0xFF)[:, None]
    return result


@triton.jit
def finish_tile(
    total,
    bias,
    rows,
    is_row,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return float32 [TOKENS, ROWS], or [TOKENS, ROWS / 2] after the gate. `bias` points to that of a weight's first
    row."""
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gates, ups = tl.split(tl.permute(tl.reshape(total, (ROWS // 2, 2, TOKENS)), (0, 2, 1)))
        total = apply_gate(gates, ups, CLAMPED, ALPHA, LIMIT)
    return total.T
