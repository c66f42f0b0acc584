"""Low-rank adapters of a product, for tiles of tokens that have the same adapter.

`shrink` computes A x, `expand` adds scale * B (A x) to the product. Both read the number of tiles on the device, and
programs of other tiles return at once. A sum over features is split at fixed positions, so that few tokens keep many
multiprocessors reading, and the parts are added in order. So a row's result depends on no other row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagleray.kernels.cuda.adapter_tiles import SMALL_TILE, AdapterTiles

MAX_LAYERS = 3
"""Layers whose outputs one product concatenates: queries, keys and values."""

SPLIT_FEATURES = 1024
"""Most features that one program of `shrink` adds up for one block of ranks."""


SHRINK_STAGES, EXPAND_STAGES = 4, 2
"""Tiles of features, or of ranks, that are on their way from memory, plus one."""


@dataclass(frozen=True, slots=True)
class AdapterKernelConfig:
    """Sizes of the kernels' tiles for adapters of up to `max_rank`."""

    max_rank: int
    is_float32: bool

    @property
    def ranks(self) -> int:
        """Ranks that are computed at a time."""
        return min(max(triton.next_power_of_2(self.max_rank), 16), 32 if self.is_float32 else 64)

    @property
    def features(self) -> int:
        """Features of `shrink` that are multiplied at a time."""
        return 32 if self.is_float32 else 128

    def split_features(self, in_features: int) -> int:
        """Return the features that one program of `shrink` adds up, about the same number in all: more if the blocks of
        ranks are enough programs."""
        most = SPLIT_FEATURES * triton.cdiv(self.max_rank, self.ranks)
        return round_up(triton.cdiv(in_features, triton.cdiv(in_features, most)), self.features)

    def num_splits(self, in_features: int) -> int:
        return triton.cdiv(in_features, self.split_features(in_features))

    def outputs(self, tile: int) -> int:
        """Return the outputs that one program of `expand` computes for a tile of tokens."""
        return 32 if self.is_float32 else 64 if tile == SMALL_TILE else 128


def round_up(number: int, grain: int) -> int:
    return triton.cdiv(number, grain) * grain


def shrink_warps(config: AdapterKernelConfig, tile: int) -> int:
    """Return the warps of a program of `shrink`: a tile of 16 by 16 results has work for two."""
    return 2 if config.ranks == tile == SMALL_TILE else 4


def expand_warps(tile: int) -> int:
    """Return the warps of a program of `expand`."""
    return 4 if tile == SMALL_TILE else 8


def inner_shape(max_rank: int, in_features: int, num_layers: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the shape (splits, layers, ranks) of the results of `shrink` for one token, of a product in `dtype`."""
    config = AdapterKernelConfig(max_rank, dtype == torch.float32)
    return config.num_splits(in_features), num_layers, max_rank


def shrink(x: Tensor, a: Tensor, ranks: Tensor, tiles: AdapterTiles, *, out: Tensor) -> None:
    """Write A x of the tokens in tiles to `out`, float32 [max_tiles * tile, splits, layers, max_rank] (see
    `inner_shape`): the parts of each sum, of the ranks that the tile's adapter has. Nothing else is written.

    `x`: [num_tokens, in_features]; `a`: [num_slots, layers, max_rank, in_features] of the same dtype; `ranks`: int32
    [num_slots, layers], 0 for a layer without an adapter.
    """
    num_slots, num_layers, max_rank, in_features = a.shape
    max_tiles, tile = tiles.tokens.shape
    config = AdapterKernelConfig(max_rank, x.dtype == torch.float32)
    splits = config.num_splits(in_features)
    assert x.shape[1] == in_features and x.dtype == a.dtype and x.stride(1) == 1
    assert a.is_contiguous() and ranks.is_contiguous() and ranks.shape == (num_slots, num_layers)
    assert out.is_contiguous() and out.shape == (max_tiles * tile, splits, num_layers, max_rank)
    blocks = triton.cdiv(max_rank, config.ranks)
    _shrink[(max_tiles, num_layers * blocks, splits)](
        *(x, a, ranks, tiles.num_tiles, tiles.slots, tiles.tokens, out),
        X_STRIDE=x.stride(0),
        K=in_features,
        LAYERS=num_layers,
        MAX_RANK=max_rank,
        RANKS=config.ranks,
        TOKENS=tile,
        FEATURES=config.features,
        SPLIT=config.split_features(in_features),
        num_warps=shrink_warps(config, tile),
        num_stages=SHRINK_STAGES,
    )


@triton.jit
def _shrink(
    x,
    a,
    ranks,
    num_tiles,
    tile_slots,
    tile_tokens,
    out,
    X_STRIDE: tl.constexpr,
    K: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    NUM_BLOCKS: tl.constexpr = (MAX_RANK + RANKS - 1) // RANKS
    NUM_SPLITS: tl.constexpr = (K + SPLIT - 1) // SPLIT
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    slot = tl.load(tile_slots + tile).to(tl.int64)
    layer = tl.program_id(1) // NUM_BLOCKS
    rows = tl.program_id(1) % NUM_BLOCKS * RANKS + tl.arange(0, RANKS)
    split = tl.program_id(2)
    rank = tl.load(ranks + slot * LAYERS + layer)
    if tl.program_id(1) % NUM_BLOCKS * RANKS >= rank:
        return
    is_row = rows < rank
    places = tile * TOKENS + tl.arange(0, TOKENS)
    tokens = tl.load(tile_tokens + places)
    is_token = tokens >= 0
    x += tokens.to(tl.int64) * X_STRIDE
    a += (slot * LAYERS + layer) * (MAX_RANK * K) + rows * K
    tl.static_assert(SPLIT % FEATURES == 0)
    total = tl.zeros((RANKS, TOKENS), tl.float32)
    for start in range(0, SPLIT, FEATURES):
        columns = split * SPLIT + start + tl.arange(0, FEATURES)
        is_column = columns[None, :] < K
        inputs = tl.load(x[:, None] + columns[None, :], mask=is_token[:, None] & is_column, other=0.0)
        factor = tl.load(a[:, None] + columns[None, :], mask=is_row[:, None] & is_column, other=0.0)
        total = tl.dot(factor, inputs.T, total, input_precision="ieee")
    out += ((places.to(tl.int64) * NUM_SPLITS + split) * LAYERS + layer) * MAX_RANK
    tl.store(out[:, None] + rows[None, :], total.T, mask=is_token[:, None] & is_row[None, :])


def expand(
    inner: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    tiles: AdapterTiles,
    out_features: Sequence[int],
    *,
    out: Tensor,
) -> None:
    """Add scale * B (A x) of the tokens in tiles to `out` [num_tokens, outputs], of the dtype of `b`. The sum is
    float32, rounded once; A x is rounded to that dtype before.

    `inner`: the result of `shrink`; `b`: [num_slots, outputs, rank_stride], whose first ranks are those of an adapter;
    `ranks` and `scales`: int32 and float32 [num_slots, layers]; `out_features`: outputs of each layer.
    """
    num_slots, num_outputs, rank_stride = b.shape
    max_tiles, tile = tiles.tokens.shape
    _, splits, num_layers, max_rank = inner.shape
    config = AdapterKernelConfig(max_rank, b.dtype == torch.float32)
    assert len(out_features) == num_layers <= MAX_LAYERS and sum(out_features) == num_outputs == out.shape[1]
    assert inner.is_contiguous() and len(inner) == max_tiles * tile and b.is_contiguous() and max_rank <= rank_stride
    assert ranks.shape == scales.shape == (num_slots, num_layers) and ranks.is_contiguous() and scales.is_contiguous()
    assert out.stride(1) == 1 and out.dtype == b.dtype
    outputs = config.outputs(tile)
    sizes = [*out_features, *[0] * (MAX_LAYERS - num_layers)]
    _expand[(max_tiles, sum(triton.cdiv(size, outputs) for size in out_features))](
        *(inner, b, ranks, scales, tiles.num_tiles, tiles.slots, tiles.tokens, out),
        OUT_STRIDE=out.stride(0),
        SIZE_0=sizes[0],
        SIZE_1=sizes[1],
        SIZE_2=sizes[2],
        SPLITS=splits,
        LAYERS=num_layers,
        MAX_RANK=max_rank,
        RANK_STRIDE=rank_stride,
        RANKS=config.ranks,
        TOKENS=tile,
        OUTPUTS=outputs,
        num_warps=expand_warps(tile),
        num_stages=EXPAND_STAGES,
    )


@triton.jit
def _expand(
    inner,
    b,
    ranks,
    scales,
    num_tiles,
    tile_slots,
    tile_tokens,
    out,
    OUT_STRIDE: tl.constexpr,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    SPLITS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    RANKS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    # a block has outputs of one layer
    BLOCKS_0: tl.constexpr = (SIZE_0 + OUTPUTS - 1) // OUTPUTS
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (SIZE_1 + OUTPUTS - 1) // OUTPUTS
    block = tl.program_id(1)
    layer = (block >= BLOCKS_0).to(tl.int32) + (block >= BLOCKS_1).to(tl.int32)
    first = tl.where(layer == 0, 0, tl.where(layer == 1, SIZE_0, SIZE_0 + SIZE_1))
    end = tl.where(layer == 0, SIZE_0, tl.where(layer == 1, SIZE_0 + SIZE_1, SIZE_0 + SIZE_1 + SIZE_2))
    block -= tl.where(layer == 0, 0, tl.where(layer == 1, BLOCKS_0, BLOCKS_1))

    slot = tl.load(tile_slots + tile).to(tl.int64)
    rank = tl.load(ranks + slot * LAYERS + layer)
    if rank == 0:
        return
    scale = tl.load(scales + slot * LAYERS + layer)
    places = tile * TOKENS + tl.arange(0, TOKENS)
    tokens = tl.load(tile_tokens + places)
    is_token = tokens >= 0
    rows = first + block * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = rows < end
    inner += (places.to(tl.int64) * (SPLITS * LAYERS) + layer) * MAX_RANK
    b += slot * ((SIZE_0 + SIZE_1 + SIZE_2) * RANK_STRIDE) + rows * RANK_STRIDE
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for start in range(0, MAX_RANK, RANKS):
        columns = start + tl.arange(0, RANKS)
        is_column = columns[None, :] < rank
        reduced = tl.zeros((TOKENS, RANKS), tl.float32)
        for split in range(SPLITS):
            part = inner[:, None] + (split * (LAYERS * MAX_RANK) + columns)[None, :]
            reduced += tl.load(part, mask=is_token[:, None] & is_column, other=0.0)
        factor = tl.load(b[:, None] + columns[None, :], mask=is_row[:, None] & is_column, other=0.0)
        total = tl.dot(factor, reduced.to(factor.dtype).T, total, input_precision="ieee")
    out += tokens.to(tl.int64)[:, None] * OUT_STRIDE + rows[None, :]
    is_inside = is_token[:, None] & is_row[None, :]
    sums = tl.load(out, mask=is_inside, other=0.0).to(tl.float32) + total.T * scale
    tl.store(out, sums.to(out.dtype.element_ty), mask=is_inside)
