"""Attention in plain torch against the plainest way to compute the same."""

from __future__ import annotations

import math

import pytest
import torch
from device_batches import random_batch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagleray.kernels.torch import attention
from eagleray.kernels.torch.attention import DeviceBatch, build_attention_metadata, write_cache

HEAD_DIM = 8


def naive_attention(
    queries: torch.Tensor, cache: torch.Tensor, batch: DeviceBatch, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Compute one query and one head at a time, in float64."""
    num_kv_heads, block_size = cache.shape[2] // 2, cache.shape[1]
    group = queries.shape[1] // num_kv_heads
    out, token = torch.empty_like(queries, dtype=torch.float64), 0
    for row, (context, count) in enumerate(zip(batch.seq_lens, batch.query_lens, strict=True)):
        slots = [batch.block_table[row, p // block_size] * block_size + p % block_size for p in range(context)]
        keys_values = cache.flatten(0, 1)[torch.stack(slots)].double()
        for position in range(context - count, context):
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            for head in range(queries.shape[1]):
                keys = keys_values[seen, head // group]
                values = keys_values[seen, num_kv_heads + head // group]
                scores = keys @ queries[token, head].double() / math.sqrt(queries.shape[2])
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                out[token, head] = torch.softmax(scores, 0)[: len(values)] @ values
            token += 1
    return out.flatten(1)


def check_attend(
    rows: list[tuple[int, int]],
    *,
    window: int | None,
    block_size: int,
    num_kv_heads: int,
    group: int,
    has_sinks: bool = False,
) -> None:
    batch = random_batch(rows, block_size)
    num_tokens = len(batch.slot_mapping)
    queries = torch.randn(num_tokens, num_kv_heads * group, HEAD_DIM)
    cache = torch.randn(int(batch.block_table.max()) + 4, block_size, 2 * num_kv_heads, HEAD_DIM)
    keys_values = torch.randn(num_tokens, 2 * num_kv_heads, HEAD_DIM)
    write_cache(keys_values, cache, batch.slot_mapping)
    sinks = torch.randn(num_kv_heads * group) * 2 if has_sinks else None
    out = attention.attend(queries, keys_values, cache, build_attention_metadata(batch, cache, window), sinks)
    expected = naive_attention(queries, cache, batch, window, sinks)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


ROWS = st.one_of(
    st.tuples(st.integers(0, 60), st.just(1)),
    st.tuples(st.just(0), st.integers(1, 20)),
    st.tuples(st.integers(1, 30), st.integers(2, 20)),
)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 5, 16, 100]),
    block_size=st.sampled_from([1, 4, 16]),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    group_bytes=st.sampled_from([1, 4096, 1 << 20]),
    max_queries=st.sampled_from([4, 256]),
    has_sinks=st.booleans(),
)
@example(
    rows=[(2, 1), (60, 1), (30, 1)],
    window=16,
    block_size=1,
    num_kv_heads=1,
    group=1,
    group_bytes=1,
    max_queries=4,
    has_sinks=False,
)
def test_attend_any_batch_equals_float64(
    rows, window, block_size, num_kv_heads, group, group_bytes, max_queries, has_sinks
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "GROUP_BYTES", group_bytes)
        patch.setattr(attention, "MAX_QUERIES", max_queries)
        patch.setattr(attention, "SMALL_CONTEXT", 2)
        sizes = {"block_size": block_size, "num_kv_heads": num_kv_heads, "group": group}
        check_attend(rows, window=window, has_sinks=has_sinks, **sizes)


def test_attention_metadata_rows_of_different_lengths_are_padded_little():
    batch = random_batch([(1999, 1)] + [(9, 1)] * 30, 16)
    cache = torch.zeros(200, 16, 4, HEAD_DIM)
    metadata = build_attention_metadata(batch, cache, None)
    read = sum(len(group.block_ids) for group in metadata.decodes)
    needed = sum(-(-context // 16) for context in batch.seq_lens)
    assert read <= 2 * needed


def test_attention_metadata_window_reads_only_visible_blocks():
    batch = random_batch([(1999, 1), (1500, 1), (1000, 50)], 16)
    metadata = build_attention_metadata(batch, torch.zeros(300, 16, 4, HEAD_DIM), 32)
    assert sum(len(group.block_ids) for group in metadata.decodes) <= 2 * 3
    assert len(metadata.prefills[0].block_ids) <= 6


def test_write_cache_float16_overflow_stays_in_its_row():
    """Blocks are reused and read as padding, so infinities of one request must not reach another."""
    cache = torch.zeros(4, 4, 2, HEAD_DIM, dtype=torch.float16)
    write_cache(torch.full((4, 2, HEAD_DIM), torch.inf, dtype=torch.float16), cache, torch.arange(4))
    batch = random_batch([(7, 1), (0, 1)], 4)
    table = torch.tensor([[2, 3], [1, 0]])
    batch = DeviceBatch(**{name: getattr(batch, name) for name in DeviceBatch.__slots__} | {"block_table": table})
    queries = torch.ones(2, 1, HEAD_DIM, dtype=torch.float16)
    out = attention.attend(queries, queries, cache, build_attention_metadata(batch, cache, None))
    assert out.isfinite().all()
