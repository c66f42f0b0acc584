"""Tiles of tokens that have the same adapter, made by the host for every batch and read by all products of a pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from eagleray.kernels.forward_batch import AdapterGroups, Int32Array

FEW_TOKENS = 512
"""Tokens of a batch up to which tiles are small, so that rows with different adapters fill them."""

SMALL_TILE, LARGE_TILE = 16, 64

NO_TOKEN = -1
"""Place of a tile behind its last token."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTiles:
    """The tiles of a batch on the device, int32. Only the first `num_tiles` tiles are written."""

    num_tiles: Tensor
    """[1]"""
    slots: Tensor
    """[max_tiles] slot of each tile's adapter"""
    tokens: Tensor
    """[max_tiles, tile] tokens of each tile, then `NO_TOKEN`"""


def tile_size(num_tokens: int) -> int:
    """Return the tokens of a tile, in a batch of this many tokens with and without adapters."""
    return SMALL_TILE if num_tokens <= FEW_TOKENS else LARGE_TILE


def max_tiles(num_tokens: int, num_slots: int) -> int:
    """Return the most tiles that the tokens of a batch take, whichever of the slots they have."""
    tile = tile_size(num_tokens)
    num_groups = min(num_tokens, num_slots)
    return (num_tokens + num_groups * (tile - 1)) // tile


def write_tiles(groups: AdapterGroups, slots: Int32Array, tokens: Int32Array) -> int:
    """Write the tiles of `groups` to the first rows of `slots` [max_tiles] and `tokens` [max_tiles, tile], and return
    their number."""
    counts, tile = np.diff(groups.offsets), tokens.shape[1]
    num_tiles = -(-counts // tile)
    total = int(num_tiles.sum())
    slots[:total] = np.repeat(groups.slots, num_tiles)
    tokens[:total] = NO_TOKEN
    # a group's first tile begins at a multiple of the tile, and its tokens follow each other from there
    starts = tile * (np.cumsum(num_tiles) - num_tiles)
    places = np.arange(len(groups.tokens)) + np.repeat(starts - groups.offsets[:-1], counts)
    tokens.reshape(-1)[places] = groups.tokens
    return total
