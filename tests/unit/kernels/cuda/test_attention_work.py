"""The division of a batch's attention into tiles and splits."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eagleray.kernels.cuda.attention_work import max_split_work, query_tiles, split_work


@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=6),
    per_tile=st.integers(1, 9),
    first_row=st.integers(0, 2),
)
def test_query_tiles_any_batch_cover_each_query_once(rows, per_tile, first_row):
    query_lens = np.array([queries for _, queries in rows], np.int32)
    seq_lens = np.array([cached + queries for cached, queries in rows], np.int32)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    tiles = query_tiles(starts, seq_lens, per_tile, first_row)
    assert tiles.dtype == np.int32 and tiles.flags.c_contiguous
    expected = {(row, first) for row in range(first_row, len(rows)) for first in range(0, query_lens[row], per_tile)}
    assert len(tiles) == len(expected) and {(row, first) for row, first in tiles.tolist()} == expected
    num_keys = [seq_lens[row] - query_lens[row] + first for row, first in tiles]
    assert num_keys == sorted(num_keys, reverse=True)


@given(
    seq_lens=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 8, 50]),
    split_keys=st.sampled_from([1, 8, 32]),
    max_splits=st.sampled_from([2, 4, 32]),
)
def test_split_work_any_batch_covers_each_visible_key_once(seq_lens, window, split_keys, max_splits):
    contexts = np.array(seq_lens, np.int32)
    work, starts = split_work(contexts, window, split_keys, max_splits)
    assert work.dtype == starts.dtype == np.int32 and work.flags.c_contiguous
    assert len(work) <= max_split_work(len(seq_lens), min(window or 300, 300), split_keys, max_splits)
    num_left = len(work)
    for row, context in enumerate(seq_lens):
        splits = work[work[:, 0] == row, 1]
        num_left -= len(splits)
        if context == 0:
            assert len(splits) == 0
            continue
        assert np.array_equal(work[starts[row] : starts[row] + len(splits)], [(row, split) for split in splits])
        first = 0 if window is None else max(context - window, 0)
        alone, _ = split_work(contexts[row : row + 1], window, split_keys, max_splits)
        assert np.array_equal(alone[:, 1], splits), "other rows do not change a row's splits"
        assert 1 <= len(splits) <= max_splits
        size = split_keys
        while (context - first) > size * (max_splits - 1):
            size += split_keys
        assert splits.tolist() == list(range(first // size, (context - 1) // size + 1))
    assert num_left == 0


def test_split_work_rows_with_most_keys_come_first():
    work, starts = split_work(np.array([5, 0, 70, 20], np.int32), None, 16, 32)
    assert work.tolist() == [[2, 0], [2, 1], [2, 2], [2, 3], [2, 4], [3, 0], [3, 1], [0, 0]]
    assert starts[[2, 3, 0]].tolist() == [0, 5, 7]
