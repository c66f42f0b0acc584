"""The attention kernels for rows with one query against float64."""

from __future__ import annotations

import pytest
import torch
from attention_cases import PagedBatch, naive_attention, paged_batch, poisoned_cache
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton_compile import MAX_SHARED_BYTES, compile_kernel

from eagleray.kernels.cuda.attention_work import MAX_SPLITS, SPLIT_KEYS, max_split_work, split_work
from eagleray.kernels.cuda.triton import decode_attention
from eagleray.kernels.cuda.triton.decode_attention import SplitWorkspace, attend_decodes, decode_tiling


def attend(
    queries, cache, batch: PagedBatch, window=None, sinks=None, split_keys=32, max_splits=4, num_programs=3
) -> torch.Tensor:
    """Attend in buffers that are larger than the batch's work and poisoned."""
    num_rows, head_dim = len(batch.seq_lens), cache.shape[3]
    found, row_starts = split_work(batch.seq_lens.numpy(), window, split_keys, max_splits)
    capacity = max_split_work(num_rows, int(batch.seq_lens.max()), split_keys, max_splits)
    work = torch.full((capacity, 2), 1 << 30, dtype=torch.int32)
    work[: len(found)] = torch.from_numpy(found)
    shape = capacity, queries.shape[1] // head_dim, head_dim
    workspace = SplitWorkspace.of(torch.full((SplitWorkspace.num_floats(*shape) + 3,), torch.nan), *shape)
    out = torch.full_like(queries, torch.nan)
    num_work = torch.tensor([len(found)], dtype=torch.int32)
    attend_decodes(
        queries,
        cache,
        batch.block_table,
        batch.seq_lens,
        work,
        num_work,
        torch.from_numpy(row_starts),
        workspace,
        out,
        num_programs=num_programs,
        window=window,
        sinks=sinks,
        split_keys=split_keys,
        max_splits=max_splits,
    )
    return out


@settings(max_examples=12)
@given(
    contexts=st.lists(st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 64, 65, 96, 97, 100]), min_size=1, max_size=3),
    window=st.sampled_from([None, None, 1, 5, 32, 70]),
    block_size=st.sampled_from([1, 5, 16]),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 4, 7]),
    head_dim=st.sampled_from([8, 16, 20]),
    has_sinks=st.booleans(),
    max_splits=st.sampled_from([2, 4, 6]),
)
@example([100, 0, 33], None, 16, 2, 7, 8, False, 4)
@example([97, 31], 33, 5, 1, 3, 20, True, 6)
@example([64, 16], None, 16, 1, 4, 16, True, 2)
def test_attend_decodes_any_batch_equals_float64(
    contexts, window, block_size, num_kv_heads, group, head_dim, has_sinks, max_splits
):
    batch = paged_batch([(context - 1, 1) if context else (0, 0) for context in contexts], block_size)
    cache = poisoned_cache(batch, block_size, 2 * num_kv_heads, head_dim)
    queries = torch.full((len(contexts), num_kv_heads * group * head_dim), torch.nan)
    real = batch.seq_lens > 0
    queries[real] = torch.randn(batch.num_tokens, queries.shape[1])
    sinks = torch.randn(num_kv_heads * group) * 2 if has_sinks else None
    out = attend(queries, cache, batch, window, sinks, max_splits=max_splits)
    expected = naive_attention(queries[real], cache, batch, window=window, sinks=sinks)
    torch.testing.assert_close(out[real].double(), expected, atol=1e-5, rtol=0)
    assert out[~real].isnan().all(), "padded rows are left alone"


@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (80, 3), (128, 4)])
def test_attend_decodes_real_head_size_equals_float64(head_dim, group):
    batch = paged_batch([(99, 1)], 16)
    cache = poisoned_cache(batch, 16, 2, head_dim, dtype=torch.float16)
    queries = torch.randn(1, group * head_dim).half()
    expected = naive_attention(queries, cache, batch)
    torch.testing.assert_close(attend(queries, cache, batch, split_keys=64).double(), expected, atol=4e-3, rtol=0)


def test_attend_decodes_float8_cache_equals_float64():
    batch = paged_batch([(69, 1), (3, 1)], 16)
    cache = poisoned_cache(batch, 16, 2, 16).nan_to_num(0.0).to(torch.float8_e4m3fn)
    queries = torch.randn(2, 64)
    expected = naive_attention(queries, cache.float(), batch)
    torch.testing.assert_close(attend(queries, cache, batch).double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 40])
def test_attend_decodes_row_has_same_bits_in_any_batch_and_grid(window):
    batch = paged_batch([(99, 1), (200, 1), (11, 1), (0, 0)], 4)
    cache = poisoned_cache(batch, 4, 4, 8)
    queries, sinks = torch.randn(4, 32), torch.randn(4)
    expected = attend(queries, cache, batch, window, sinks, num_programs=1)
    for num_programs in (4, 64):
        result = attend(queries, cache, batch, window, sinks, num_programs=num_programs)
        assert torch.equal(result[:3], expected[:3])
    for row in range(3):
        alone = PagedBatch(
            batch.block_table[row : row + 1], batch.seq_lens[row : row + 1], batch.query_start_loc, 0, []
        )
        result = attend(queries[row : row + 1].contiguous(), cache, alone, window, sinks, num_programs=2)
        assert torch.equal(result[0], expected[row])


def test_attend_decodes_no_work_stores_nothing():
    batch = paged_batch([(0, 0), (0, 0)], 4)
    out = attend(torch.full((2, 8), torch.nan), torch.zeros(3, 4, 2, 8), batch)
    assert out.isnan().all()


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "window", "has_sinks", "types", "capability"),
    [
        (64, 8, 64, 128, True, ("bf16", "bf16"), 90),
        *(
            pytest.param(*case, marks=pytest.mark.grid)
            for case in (
                (32, 8, 128, 0, False, ("bf16", "bf16"), 80),
                (16, 8, 128, 0, False, ("bf16", "fp8e4nv"), 100),
                (8, 4, 256, 0, False, ("bf16", "bf16"), 90),
                (10, 2, 80, 0, False, ("fp32", "fp32"), 90),
                *((32, 8, 128, 0, False, ("bf16", "bf16"), capability) for capability in (90, 100)),
                (28, 4, 128, 0, False, ("fp16", "fp16"), 90),
                (64, 8, 64, 0, True, ("bf16", "fp8e4nv"), 90),
                (16, 8, 128, 0, False, ("bf16", "fp8e4nv"), 90),
                (64, 2, 128, 0, False, ("bf16", "bf16"), 90),
            )
        ),
    ],
)
def test_attend_splits_kernel_compiles(
    tmp_path, num_heads, num_kv_heads, head_dim, window, has_sinks, types, capability
):
    tiling = decode_tiling(num_heads // num_kv_heads, head_dim, *(DTYPES[name] for name in types))
    signature = {"queries": f"*{types[0]}", "cache": f"*{types[1]}", "out": f"*{types[0]}"}
    signature |= dict.fromkeys(("block_table", "seq_lens", "work", "num_work"), "*i32")
    signature |= {"score_scale": "fp32", "block_table_stride": "i32"} | ({"sinks": "*bf16"} if has_sinks else {})
    signature |= dict.fromkeys(("totals", "maxima", "sums"), "*fp32")
    constants = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16}
    constants |= {"WINDOW": window, "HAS_SINKS": has_sinks, "SPLIT_KEYS": SPLIT_KEYS, "MAX_SPLITS": MAX_SPLITS}
    constants |= {"BLOCK_M": tiling.queries, "BLOCK_N": tiling.keys, "BLOCK_D": 1 << (head_dim - 1).bit_length()}
    compiled = compile_kernel(
        decode_attention._attend_splits_kernel,
        signature,
        constants | ({} if has_sinks else {"sinks": None}),
        capability=capability,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        directory=tmp_path,
    )
    per_program = MAX_SHARED_BYTES // decode_attention.PROGRAMS_PER_MULTIPROCESSOR
    assert compiled.shared_bytes + 1024 <= per_program, "the system takes 1 KB of each program's share"
    assert compiled.registers * 32 * tiling.num_warps * decode_attention.PROGRAMS_PER_MULTIPROCESSOR <= 1 << 16
    assert not compiled.spills


@pytest.mark.parametrize(
    ("num_heads", "features", "capability"), [(32, 128, 80), (32, 128, 90), (32, 128, 100), (16, 512, 90)]
)
def test_merge_splits_kernel_compiles(tmp_path, num_heads, features, capability):
    signature = dict.fromkeys(("seq_lens", "row_starts"), "*i32") | {"out": "*bf16"}
    signature |= dict.fromkeys(("totals", "maxima", "sums"), "*fp32")
    constants = {"NUM_HEADS": num_heads, "FEATURES": features, "WINDOW": 0, "SPLIT_KEYS": SPLIT_KEYS}
    constants |= {"MAX_SPLITS": MAX_SPLITS, "BLOCK_S": MAX_SPLITS, "BLOCK_D": decode_attention.MERGED_FEATURES}
    compiled = compile_kernel(
        decode_attention._merge_splits_kernel,
        signature,
        constants,
        capability=capability,
        num_warps=4,
        num_stages=3,
        directory=tmp_path,
    )
    assert not compiled.spills
