"""Multi-head latent attention in plain torch against the plainest way to compute the same."""

from __future__ import annotations

import torch
from device_batches import random_batch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagleray.kernels.params import MLAParams
from eagleray.kernels.torch import attention, mla
from eagleray.kernels.torch.attention import DeviceBatch, ForwardContext

RANK, PLAIN, ROTATED = 12, 6, 4
SCALE = 0.3


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [n, .., ROTATED] by `angles` [n, ROTATED / 2]."""
    angles = angles.view(len(x), *[1] * (x.dim() - 2), -1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def naive(queries: torch.Tensor, cache: torch.Tensor, params: MLAParams, batch: DeviceBatch) -> torch.Tensor:
    """Compute one query and one head at a time, in float64. Queries [num_tokens, num_heads, ..] are rotated already."""
    block_size, token = cache.shape[1], 0
    out = torch.empty(len(queries), params.num_heads, params.value_dim, dtype=torch.float64)
    for row, (context, count) in enumerate(zip(batch.seq_lens, batch.query_lens, strict=True)):
        slots = [batch.block_table[row, p // block_size] * block_size + p % block_size for p in range(context)]
        cached = cache.flatten(0, 1)[torch.stack(slots)].double()
        for position in range(context - count, context):
            seen = cached[: position + 1]
            for head in range(params.num_heads):
                keys = torch.cat((seen[:, :RANK] @ params.keys[head].double().T, seen[:, RANK:]), dim=1)
                scores = keys @ queries[token, head].double() * SCALE
                out[token, head] = torch.softmax(scores, 0) @ seen[:, :RANK] @ params.values[head].double().T
            token += 1
    return out.flatten(1)


ROWS = st.one_of(
    st.tuples(st.integers(0, 60), st.just(1)),
    st.tuples(st.just(0), st.integers(1, 20)),
    st.tuples(st.integers(1, 30), st.integers(2, 20)),
)


@settings(max_examples=40)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16]),
    num_heads=st.integers(1, 3),
    value_dim=st.sampled_from([5, 10, 14]),
    room=st.sampled_from([1, 1 << 30]),
    at_once=st.sampled_from([3, 256]),
)
@example(rows=[(40, 1), (2, 1), (1, 1)], block_size=1, num_heads=2, value_dim=5, room=1, at_once=3)
def test_mla_any_batch_equals_float64(rows, block_size, num_heads, value_dim, room, at_once):
    batch = random_batch(rows, block_size)
    num_tokens = len(batch.slot_mapping)
    params = MLAParams(
        num_heads=num_heads,
        plain_dim=PLAIN,
        rotated_dim=ROTATED,
        value_dim=value_dim,
        scale=SCALE,
        norm=torch.rand(RANK) + 0.5,
        norm_eps=1e-6,
        keys=torch.randn(num_heads, PLAIN, RANK),
        values=torch.randn(num_heads, value_dim, RANK),
    )
    queries = torch.randn(num_tokens, num_heads, PLAIN + ROTATED)
    latents = torch.randn(num_tokens, RANK + ROTATED)
    cache = torch.randn(int(batch.block_table.max()) + 4, block_size, RANK + ROTATED)
    angles = batch.positions[:, None] * torch.tensor([1.0, 0.1])

    expected_cache = cache.clone().flatten(0, 1)
    normed = latents[:, :RANK] * torch.rsqrt(latents[:, :RANK].pow(2).mean(1, keepdim=True) + 1e-6) * params.norm
    expected_cache[batch.slot_mapping] = torch.cat((normed, rotated(latents[:, RANK:], angles)), dim=1)
    expected_cache = expected_cache.view_as(cache)
    expected_queries = torch.cat((queries[..., :PLAIN], rotated(queries[..., PLAIN:], angles)), dim=2)
    expected = naive(expected_queries, expected_cache, params, batch)

    before = mla.EXPANDED_BYTES, mla.MAX_QUERIES, attention.MAX_QUERIES
    mla.EXPANDED_BYTES, mla.MAX_QUERIES, attention.MAX_QUERIES = room, at_once, at_once
    try:
        context = ForwardContext(
            cos=torch.cat((angles.cos(), angles.cos()), dim=1)[:, None],
            sin=torch.cat((-angles.sin(), angles.sin()), dim=1)[:, None],
            slot_mapping=batch.slot_mapping,
            metadata={None: attention.build_attention_metadata(batch, cache, None)},
        )
        out = mla.LatentAttention(params)(queries.flatten(1), latents, cache, context)
    finally:
        mla.EXPANDED_BYTES, mla.MAX_QUERIES, attention.MAX_QUERIES = before
    torch.testing.assert_close(cache, expected_cache, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
