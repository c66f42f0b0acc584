"""Products with quantized weights, for any number of tokens.

For up to 64 tokens the time is that of reading the weight once: tiles have few of its rows, so that all multiprocessors
read. For more tokens they are as large as registers allow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagleray.kernels.cuda.triton.gate import gate_constants
from eagleray.kernels.cuda.triton.tile_product import (
    TileConfig,
    WeightOperand,
    finish_tile,
    multiply_tile,
    tile_config,
    weight_rows,
)
from eagleray.kernels.params import ClampedSwiglu
from eagleray.kernels.quantized import BlockWeight

FEW_TOKENS = 64

MIN_BLOCKS = 264
"""Blocks of rows that keep all multiprocessors reading: two for each of a H200's."""

TILES_OF_A_GROUP = 8
"""Tiles of tokens that are multiplied with a block of rows before the next block is read."""


def quantized_linear(x: Tensor, weight: BlockWeight, bias: Tensor | None = None, *, out: Tensor) -> None:
    """Write the product x @ weight.T + bias to `out` [num_tokens, rows].

    `x`: [num_tokens, columns] of the model's dtype; `weight`: [rows, columns]; `bias`: [rows]. Float32 sums, rounded
    once.
    """
    _launch(x, weight, bias, out, GATED=False, **gate_constants(None))


def quantized_gated_linear(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    clamp: ClampedSwiglu | None = None,
    *,
    out: Tensor,
) -> None:
    """Write silu(gate) * up, or what `clamp` says, to `out` [num_tokens, size]. `weight`: [2 * size, columns], the rows
    of all gates before the rows of all gated values."""
    _launch(x, weight, bias, out, GATED=True, **gate_constants(clamp))


def linear_config(num_tokens: int, weight: BlockWeight, dtype: torch.dtype) -> TileConfig:
    """Return the sizes of tiles for a number of tokens."""
    tokens = min(max(triton.next_power_of_2(num_tokens), 16), 128)
    if num_tokens > FEW_TOKENS or dtype == torch.float32:
        return tile_config(tokens, weight, dtype)
    if weight.shape[0] >= 64 * MIN_BLOCKS:
        return TileConfig(tokens, 64, 128, num_warps=4, num_stages=4)
    return TileConfig(tokens, 32, 128, num_warps=2, num_stages=5)


def _launch(x: Tensor, weight: BlockWeight, bias: Tensor | None, out: Tensor, **constants: bool | float) -> None:
    (num_tokens, columns), (rows, _) = x.shape, weight.shape
    assert weight.shape[1] == columns and x.stride(1) == out.stride(1) == 1
    assert out.shape == (num_tokens, rows // 2 if constants["GATED"] else rows)
    assert bias is None or (bias.shape == (rows,) and bias.is_contiguous())
    operand = WeightOperand.of(weight)
    config = linear_config(num_tokens, weight, x.dtype)
    grid = (triton.cdiv(num_tokens, config.tokens) * triton.cdiv(rows, config.rows),)
    _linear[grid](
        *(x, operand.values, operand.scales, out if bias is None else bias, out, num_tokens),
        X_STRIDE=x.stride(0),
        OUT_STRIDE=out.stride(0),
        HAS_BIAS=bias is not None,
        **constants,
        **operand.constants,
        **config.constants,
        GROUP=TILES_OF_A_GROUP,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _linear(
    x,
    values,
    scales,
    bias,
    out,
    num_tokens,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PER_ELEMENT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
):
    # a group of tiles of tokens and a block of rows are cached while they are multiplied
    NUM_BLOCKS: tl.constexpr = (N + ROWS - 1) // ROWS
    group = tl.program_id(0) // (GROUP * NUM_BLOCKS)
    place = tl.program_id(0) % (GROUP * NUM_BLOCKS)
    group_size = tl.minimum((num_tokens + TOKENS - 1) // TOKENS - group * GROUP, GROUP)
    tile = group * GROUP + place % group_size
    block = place // group_size

    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    x += tokens.to(tl.int64) * X_STRIDE
    places = block * ROWS + tl.arange(0, ROWS)
    rows = weight_rows(places, N, GATED)
    is_row = places < N
    total = multiply_tile(
        values,
        scales,
        rows,
        is_row,
        x,
        is_token,
        TOKENS,
        ROWS,
        FEATURES,
        K,
        FORMAT,
        SCALE_ROWS,
        SCALE_COLUMNS,
        SCALE_STRIDE,
    )
    result = finish_tile(total, bias, rows, is_row, HAS_BIAS, GATED, CLAMPED, ALPHA, LIMIT, TOKENS, ROWS)
    OUT_ROWS: tl.constexpr = ROWS // 2 if GATED else ROWS
    OUT_SIZE: tl.constexpr = N // 2 if GATED else N
    features = block * OUT_ROWS + tl.arange(0, OUT_ROWS)
    out += tokens.to(tl.int64)[:, None] * OUT_STRIDE + features[None, :]
    is_inside = is_token[:, None] & (features < OUT_SIZE)[None, :]
    tl.store(out, result.to(out.dtype.element_ty), mask=is_inside)
