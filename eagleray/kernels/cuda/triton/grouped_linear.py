"""Products of pairs of a token and an expert slot with the weights of the slots."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagleray.kernels.cuda.triton.gate import gate_constants
from eagleray.kernels.cuda.triton.routing import PairTiles
from eagleray.kernels.cuda.triton.tile_product import (
    WeightOperand,
    finish_tile,
    multiply_tile,
    tile_config,
    weight_rows,
)
from eagleray.kernels.params import ClampedSwiglu
from eagleray.kernels.quantized import BlockWeight


def pair_tile(num_pairs: int, num_slots: int) -> int:
    """Return the number of pairs in a tile: about twice as many as a slot has if all slots have the same number, so
    that few slots need a second tile for few pairs."""
    average = num_pairs / num_slots
    if average <= 8:
        return 16
    if average <= 16:
        return 32
    return 64 if average <= 64 else 128


def grouped_gated_linear(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None,
    clamp: ClampedSwiglu | None,
    tiles: PairTiles,
    *,
    top_k: int,
    out: Tensor,
) -> None:
    """Write silu(gate) * up, or what `clamp` says, of each pair to `out` [num_pairs, inner].

    `x`: [num_tokens, hidden_size] of the model's dtype; pair p belongs to token p // top_k. `weight`: [num_slots, 2 *
    inner, hidden_size], `bias`: [num_slots, 2 * inner], the rows of all gates before the rows of all gated values. Rows
    of `out` without a slot are not written.
    """
    _launch(x, weight, bias, tiles, top_k, out, GATED=True, **gate_constants(clamp))


def grouped_linear(x: Tensor, weight: BlockWeight, bias: Tensor | None, tiles: PairTiles, *, out: Tensor) -> None:
    """Write the product of each pair to `out` [num_pairs, out_features]. `x`: [num_pairs, in_features] of the model's
    dtype. `weight`: [num_slots, out_features, in_features], `bias`: [num_slots, out_features]. Rows of `out` without a
    slot are not written."""
    _launch(x, weight, bias, tiles, 1, out, GATED=False, **gate_constants(None))


def _launch(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None,
    tiles: PairTiles,
    top_k: int,
    out: Tensor,
    **constants: bool | float,
) -> None:
    _, rows, columns = weight.shape
    assert x.shape[1] == columns and x.stride(1) == out.stride(1) == 1
    assert out.shape[1] == (rows // 2 if constants["GATED"] else rows)
    assert bias is None or (bias.shape == weight.shape[:2] and bias.is_contiguous())
    operand = WeightOperand.of(weight)
    config = tile_config(tiles.tile, weight, x.dtype)
    grid = (len(tiles.tile_slot) * triton.cdiv(rows, config.rows),)
    _grouped_linear[grid](
        *(x, operand.values, operand.scales, out if bias is None else bias),
        *(tiles.sorted_pairs, tiles.tile_slot, tiles.num_tiles, out),
        X_STRIDE=x.stride(0),
        OUT_STRIDE=out.stride(0),
        HAS_BIAS=bias is not None,
        TOP_K=top_k,
        **constants,
        **operand.constants,
        **config.constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def _grouped_linear(
    x,
    values,
    scales,
    bias,
    sorted_pairs,
    tile_slot,
    num_tiles,
    out,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_SIZE: tl.constexpr,
    PER_ELEMENT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    # all blocks of rows of a tile follow each other, and then the next tile of the same slot, whose weights are cached
    NUM_BLOCKS: tl.constexpr = (N + ROWS - 1) // ROWS
    tile = tl.program_id(0) // NUM_BLOCKS
    block = tl.program_id(0) % NUM_BLOCKS
    if tile >= tl.load(num_tiles):
        return
    slot = tl.load(tile_slot + tile).to(tl.int64)
    pairs = tl.load(sorted_pairs + tile * TOKENS + tl.arange(0, TOKENS))
    is_pair = pairs >= 0
    x += (pairs // TOP_K).to(tl.int64) * X_STRIDE

    places = block * ROWS + tl.arange(0, ROWS)
    rows = weight_rows(places, N, GATED)
    values += slot * (N * (K // PER_ELEMENT))
    scales += slot * SCALE_SIZE
    is_row = places < N
    total = multiply_tile(
        values,
        scales,
        rows,
        is_row,
        x,
        is_pair,
        TOKENS,
        ROWS,
        FEATURES,
        K,
        FORMAT,
        SCALE_ROWS,
        SCALE_COLUMNS,
        SCALE_STRIDE,
    )
    result = finish_tile(total, bias + slot * N, rows, is_row, HAS_BIAS, GATED, CLAMPED, ALPHA, LIMIT, TOKENS, ROWS)
    OUT_ROWS: tl.constexpr = ROWS // 2 if GATED else ROWS
    OUT_SIZE: tl.constexpr = N // 2 if GATED else N
    features = block * OUT_ROWS + tl.arange(0, OUT_ROWS)
    out += pairs.to(tl.int64)[:, None] * OUT_STRIDE + features[None, :]
    tl.store(out, result.to(out.dtype.element_ty), mask=is_pair[:, None] & (features < OUT_SIZE)[None, :])
