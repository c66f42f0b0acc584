"""Kernels against the plainest way to compute the same."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagleray.kernels.params import RouterParams
from eagleray.kernels.torch import attention, onednn
from eagleray.kernels.torch.attention import DeviceBatch, build_attention_metadata, write_cache
from eagleray.kernels.torch.functional import rms_norm
from eagleray.kernels.torch.onednn import OneDnnBackend

HEAD_DIM = 8


def random_batch(rows: list[tuple[int, int]], block_size: int) -> DeviceBatch:
    """Rows of (cached tokens, tokens to compute), with shuffled blocks."""
    rows = sorted(rows, key=lambda row: row[1] != 1)
    contexts = [cached + queries for cached, queries in rows]
    sizes = [-(-context // block_size) for context in contexts]
    blocks = torch.randperm(sum(sizes) + 3).tolist()
    table = torch.zeros(len(rows), max(sizes), dtype=torch.long)
    for row, size in enumerate(sizes):
        table[row, :size] = torch.tensor([blocks.pop() for _ in range(size)])
    positions = [torch.arange(context - queries, context) for context, (_, queries) in zip(contexts, rows, strict=True)]
    slots = [table[row, p // block_size] * block_size + p % block_size for row, p in enumerate(positions)]
    return DeviceBatch(
        token_ids=torch.cat(positions),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        block_table=table,
        seq_lens=contexts,
        query_lens=[queries for _, queries in rows],
        num_decodes=sum(queries == 1 for _, queries in rows),
    )


def naive_attention(
    queries: torch.Tensor, cache: torch.Tensor, batch: DeviceBatch, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One query and one head at a time, in float64."""
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


def attend(
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
def test_attention_of_any_batch(rows, window, block_size, num_kv_heads, group, group_bytes, max_queries, has_sinks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "GROUP_BYTES", group_bytes)
        patch.setattr(attention, "MAX_QUERIES", max_queries)
        patch.setattr(attention, "SMALL_CONTEXT", 2)
        sizes = {"block_size": block_size, "num_kv_heads": num_kv_heads, "group": group}
        attend(rows, window=window, has_sinks=has_sinks, **sizes)


def test_rows_of_very_different_lengths_are_not_padded_to_the_longest():
    batch = random_batch([(1999, 1)] + [(9, 1)] * 30, 16)
    cache = torch.zeros(200, 16, 4, HEAD_DIM)
    metadata = build_attention_metadata(batch, cache, None)
    read = sum(len(group.block_ids) for group in metadata.decodes)
    needed = sum(-(-context // 16) for context in batch.seq_lens)
    assert read <= 2 * needed


def test_a_window_reads_only_the_blocks_it_sees():
    batch = random_batch([(1999, 1), (1500, 1), (1000, 50)], 16)
    metadata = build_attention_metadata(batch, torch.zeros(300, 16, 4, HEAD_DIM), 32)
    assert sum(len(group.block_ids) for group in metadata.decodes) <= 2 * 3
    assert len(metadata.prefills[0].block_ids) <= 6


def test_an_overflow_in_float16_stays_with_its_request():
    """Blocks are reused and read as padding; what one request left there must not reach another."""
    cache = torch.zeros(4, 4, 2, HEAD_DIM, dtype=torch.float16)
    write_cache(torch.full((4, 2, HEAD_DIM), torch.inf, dtype=torch.float16), cache, torch.arange(4))
    batch = random_batch([(7, 1), (0, 1)], 4)
    table = torch.tensor([[2, 3], [1, 0]])
    batch = DeviceBatch(**{name: getattr(batch, name) for name in DeviceBatch.__slots__} | {"block_table": table})
    queries = torch.ones(2, 1, HEAD_DIM, dtype=torch.float16)
    out = attention.attend(queries, queries, cache, build_attention_metadata(batch, cache, None))
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (100, 37)])
def test_packed_products_are_the_plain_ones_for_every_number_of_rows(dtype, bias, in_features, out_features):
    weight = torch.randn(out_features, in_features) * 0.1
    offset = torch.randn(out_features) if bias else None
    weight, offset = weight.to(dtype), None if offset is None else offset.to(dtype)
    product = OneDnnBackend().linear(weight.clone(), offset)
    x = torch.randn(300, 2 * in_features).to(dtype)[:, :in_features]
    expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for rows in [*range(1, 70), 127, 128, 129, 255, 256, 257, 300]:
        out = product(x[:rows])
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected[:rows], atol=4 * rounding, rtol=2 * rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_where_nothing_can_be_packed(dtype, monkeypatch):
    monkeypatch.setattr(onednn, "_can_pack", lambda dtype: False)
    weight, x = torch.randn(32, 16).to(dtype), torch.randn(3, 16).to(dtype)
    out = OneDnnBackend().linear(weight, None)(x)
    torch.testing.assert_close(out, F.linear(x, weight))


def naive_experts(x, ids, weights, gate_up, down):
    out = torch.zeros_like(x)
    for token, (experts, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2)
            out[token] += share * F.linear(F.silu(gate) * up, down[expert])
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 50])
def test_experts_of_each_token(num_tokens):
    num_experts, top_k, hidden, size = 6, 3, 16, 12
    gate_up = torch.randn(num_experts, 2 * size, hidden)
    down = torch.randn(num_experts, hidden, size)
    x = torch.randn(num_tokens, hidden)
    scores = torch.randn(num_tokens, num_experts)
    weights, ids = torch.topk(scores.softmax(dim=1), top_k)
    kernels = OneDnnBackend()
    gated = [kernels.gated_linear(w, None) for w in gate_up]
    mixture = RouterParams(top_k=top_k, renormalize=False, round_weights=True)
    out = kernels.experts(mixture, gated, [kernels.linear(w, None) for w in down])(x, scores)
    torch.testing.assert_close(out, naive_experts(x, ids, weights, gate_up, down), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_rounds_where_transformers_does(dtype):
    x, weight = torch.randn(5, 4, 32).to(dtype), torch.rand(4, 32).to(dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), weight * normed.to(dtype), atol=1e-6, rtol=0)
