"""Division of a batch's attention into pieces of work for the device, computed on the host for every step.

Rows with several queries are cut into tiles of queries. Rows with one query are cut into splits of their keys, which
are computed side by side and merged. Neither a tile nor a split depends on the other rows of the batch.
"""

from __future__ import annotations

import numpy as np

from eagleray.kernels.forward_batch import Int32Array

SPLIT_KEYS = 256
"""Keys of a split, unless a row would have more than `MAX_SPLITS`. 8 key heads of 1,024 keys are 32 pieces of work, and
a split's partial outputs are a sixtieth of its keys and values if 4 query heads of 128 features share them."""

MAX_SPLITS = 32
"""Splits of a row: they are merged at once. Rows with more keys have longer splits."""

UNUSED = -1
"""Row of a tile that has no work."""


def query_tiles(
    query_start_loc: Int32Array, seq_lens: Int32Array, queries_per_tile: int, first_row: int = 0
) -> Int32Array:
    """Return the tiles int32 [num_tiles, 2], (row, first of the tile's queries in the row), of the rows from
    `first_row` on. The tiles with most keys come first, so that no long one is left for the end."""
    query_lens = np.diff(query_start_loc)[first_row:]
    counts = -(-query_lens // queries_per_tile)
    rows = np.repeat(np.arange(len(counts)), counts)
    first_queries = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries_per_tile
    num_keys = seq_lens[first_row:][rows] - query_lens[rows] + first_queries
    tiles = np.stack((rows + first_row, first_queries), axis=1)
    return tiles[np.argsort(-num_keys, kind="stable")].astype(np.int32)


def split_work(
    seq_lens: Int32Array, window: int | None, split_keys: int = SPLIT_KEYS, max_splits: int = MAX_SPLITS
) -> tuple[Int32Array, Int32Array]:
    """Return the work of rows with one query each, in layers with this window, and where each row's work begins.

    The first result is int32 [num_work, 2], (row, split): the splits that the row's query sees, those of a row behind
    each other and in order. The rows with most keys come first. The second is int32 [num_rows], the index of each row's
    first split in that list. Padded rows (`seq_lens` 0) have no work.
    """
    first_keys = np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - window, 0)
    sizes = _keys_per_split(seq_lens - first_keys, split_keys, max_splits)
    first_splits = first_keys // sizes
    counts = -(-seq_lens // sizes) - first_splits
    order = np.argsort(first_keys - seq_lens, kind="stable")
    ends = np.cumsum(counts[order])
    starts = np.empty_like(seq_lens)
    starts[order] = ends - counts[order]
    rows = np.repeat(order, counts[order])
    splits = np.arange(len(rows)) - starts[rows] + first_splits[rows]
    return np.stack((rows, splits), axis=1).astype(np.int32), starts


def max_split_work(num_rows: int, max_keys: int, split_keys: int = SPLIT_KEYS, max_splits: int = MAX_SPLITS) -> int:
    """Return the largest amount of work that `num_rows` rows, each seeing at most `max_keys` keys, can have."""
    # one more than the window's keys fill, because a window may begin anywhere in a split
    return num_rows * min(-(-max_keys // split_keys) + 1, max_splits)


def latent_split_keys(num_heads: int) -> int:
    """Return the keys of a split for multi-head latent attention, whose heads share the keys while each has its own
    partial output: these stay below a quarter of the keys' bytes for DeepSeek's 512 + 64 features."""
    return SPLIT_KEYS * max(num_heads // 32, 1)


def _keys_per_split(num_keys: Int32Array, split_keys: int, max_splits: int) -> Int32Array:
    """Return the keys of each row's splits: a multiple of `split_keys` such that a row that sees `num_keys` keys, which
    may begin anywhere in a split, sees at most `max_splits` splits. The kernels compute the same."""
    sizes = -(-num_keys // (split_keys * (max_splits - 1))) * split_keys
    return np.maximum(sizes, split_keys)
