"""The attention kernel for any number of queries per row against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import PagedBatch, naive_attention, ordered_matmul, paged_batch, poisoned_cache
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton_compile import MAX_SHARED_BYTES, compile_kernel

from eagleray.kernels.cuda.attention_work import query_tiles
from eagleray.kernels.cuda.triton import attention
from eagleray.kernels.cuda.triton.attention import AttentionTiling, attend_tiles, prefill_tiling, queries_per_tile

SMALL = AttentionTiling(queries=16, keys=16, num_warps=4, num_stages=1)


def tiles_of(batch: PagedBatch, group: int, num_unused: int = 0) -> torch.Tensor:
    tiles = query_tiles(batch.query_start_loc.numpy(), batch.seq_lens.numpy(), queries_per_tile(group, SMALL))
    return torch.cat((torch.from_numpy(tiles), torch.full((num_unused, 2), -1, dtype=torch.int32)))


def attend(queries, cache, batch: PagedBatch, window=None, sinks=None) -> torch.Tensor:
    out = torch.full_like(queries, torch.nan)
    group = queries.shape[1] // (cache.shape[2] // 2 * cache.shape[3])
    tiles = tiles_of(batch, group, num_unused=1)
    arguments = batch.block_table, batch.seq_lens, batch.query_start_loc, tiles, out
    attend_tiles(queries, cache, *arguments, tiling=SMALL, window=window, sinks=sinks)
    return out


ROWS = st.one_of(
    st.tuples(st.integers(0, 50), st.just(1)),
    st.tuples(st.just(0), st.integers(1, 36)),
    st.tuples(st.integers(1, 35), st.integers(2, 20)),
    st.just((0, 0)),
)


@settings(max_examples=12)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    window=st.sampled_from([None, None, 1, 5, 16, 100]),
    block_size=st.sampled_from([1, 5, 16]),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 4, 7]),
    head_dim=st.sampled_from([8, 16, 20]),
    has_sinks=st.booleans(),
)
@example([(15, 2), (0, 17), (31, 1)], None, 16, 1, 7, 8, False)
@example([(16, 16), (0, 0), (0, 33)], 16, 4, 2, 3, 20, True)
def test_attend_tiles_any_batch_equals_float64(rows, window, block_size, num_kv_heads, group, head_dim, has_sinks):
    batch = paged_batch(rows, block_size)
    cache = poisoned_cache(batch, block_size, 2 * num_kv_heads, head_dim)
    queries = torch.randn(batch.num_tokens, num_kv_heads * group * head_dim)
    sinks = torch.randn(num_kv_heads * group) * 2 if has_sinks else None
    out = attend(queries, cache, batch, window, sinks)
    expected = naive_attention(queries, cache, batch, window=window, sinks=sinks)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("head_dim", "group"), [(64, 4), (80, 3), (128, 1)])
def test_attend_tiles_real_head_size_equals_float64(head_dim, group):
    batch = paged_batch([(20, 6)], 16)
    cache = poisoned_cache(batch, 16, 2, head_dim, dtype=torch.float16)
    queries = torch.randn(batch.num_tokens, group * head_dim).half()
    expected = naive_attention(queries, cache, batch)
    torch.testing.assert_close(attend(queries, cache, batch).double(), expected, atol=4e-3, rtol=0)


def test_attend_tiles_float8_cache_equals_float64():
    batch = paged_batch([(20, 6), (3, 1)], 16)
    cache = poisoned_cache(batch, 16, 2, 16).nan_to_num(0.0).to(torch.float8_e4m3fn)
    queries = torch.randn(batch.num_tokens, 64)
    expected = naive_attention(queries, cache.float(), batch)
    torch.testing.assert_close(attend(queries, cache, batch).double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 7])
def test_attend_tiles_query_has_same_bits_in_any_tile(window, monkeypatch):
    """The last queries of a prompt, whose rest was cached by an earlier step, are the first of their tiles."""
    monkeypatch.setattr(np, "matmul", ordered_matmul)
    whole = paged_batch([(0, 40), (5, 3)], 4)
    cache = poisoned_cache(whole, 4, 2, 8)
    queries = torch.randn(whole.num_tokens, 32)
    expected = attend(queries, cache, whole, window)[:40]
    for cached in (5, 17, 39):
        part = PagedBatch(
            whole.block_table[:1],
            whole.seq_lens[:1],
            torch.tensor([0, 40 - cached], dtype=torch.int32),
            whole.num_blocks,
            [],
        )
        assert torch.equal(attend(queries[cached:40].contiguous(), cache, part, window), expected[cached:])


def test_attend_tiles_no_tile_stores_nothing():
    batch = paged_batch([(3, 2)], 4)
    queries = torch.randn(2, 8)
    out = torch.full_like(queries, torch.nan)
    cache = poisoned_cache(batch, 4, 2, 8)
    arguments = batch.block_table, batch.seq_lens, batch.query_start_loc
    for tiles in (torch.empty(0, 2, dtype=torch.int32), torch.full((2, 2), -1, dtype=torch.int32)):
        attend_tiles(queries, cache, *arguments, tiles, out, tiling=SMALL)
    assert out.isnan().all()


def test_queries_per_tile_group_larger_than_tile_fails():
    with pytest.raises(AssertionError, match="17 heads"):
        queries_per_tile(17, SMALL)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "window", "has_sinks", "types", "capability"),
    [
        (64, 8, 64, 128, True, ("bf16", "bf16"), 90),
        *(
            pytest.param(*case, marks=pytest.mark.grid)
            for case in (
                (32, 8, 128, 0, False, ("bf16", "bf16"), 90),
                (16, 8, 128, 0, False, ("bf16", "fp8e4nv"), 100),
                (8, 4, 256, 0, False, ("bf16", "bf16"), 80),
                (10, 2, 80, 0, False, ("fp32", "fp32"), 90),
                *((32, 8, 128, 0, False, ("bf16", "bf16"), capability) for capability in (80, 100)),
                *((64, 8, 64, 128, True, ("bf16", "bf16"), capability) for capability in (80, 100)),
                (64, 8, 64, 0, True, ("bf16", "bf16"), 90),
                (28, 4, 128, 0, False, ("fp16", "fp16"), 90),
                (16, 8, 128, 0, False, ("bf16", "fp8e4nv"), 90),
                (8, 4, 256, 0, False, ("bf16", "bf16"), 90),
            )
        ),
    ],
)
def test_attend_tiles_kernel_compiles(
    tmp_path, num_heads, num_kv_heads, head_dim, window, has_sinks, types, capability
):
    signature = {"queries": f"*{types[0]}", "cache": f"*{types[1]}", "out": f"*{types[0]}"}
    signature |= dict.fromkeys(("block_table", "seq_lens", "query_start_loc", "tiles"), "*i32")
    signature |= {"score_scale": "fp32", "block_table_stride": "i32"} | ({"sinks": "*bf16"} if has_sinks else {})
    tiling = prefill_tiling(head_dim, *(DTYPES[name] for name in types), capability)
    constants = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16}
    constants |= {"WINDOW": window, "HAS_SINKS": has_sinks, "BLOCK_M": tiling.queries, "BLOCK_N": tiling.keys}
    constants |= {"BLOCK_D": 1 << (head_dim - 1).bit_length()} | ({} if has_sinks else {"sinks": None})
    has_products = capability == 90 and types[0] != "fp32"  # of Hopper's tensor cores
    compiled = compile_kernel(
        attention._attend_tiles_kernel,
        signature,
        constants,
        capability=capability,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        disassemble=has_products,
        directory=tmp_path,
    )
    assert compiled.shared_bytes <= (99 * 1024 if capability == 80 else MAX_SHARED_BYTES)
    assert not compiled.spills
    assert not has_products or "HGMMA" in compiled.instructions
