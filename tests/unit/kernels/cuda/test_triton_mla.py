"""The kernels of multi-head latent attention against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import PagedBatch, ordered_matmul, paged_batch, poisoned_cache
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton_compile import HOPPER_FIRST, MAX_SHARED_BYTES, compile_kernel

from eagleray.kernels.cuda.attention_work import (
    MAX_SPLITS,
    latent_split_keys,
    max_split_work,
    query_tiles,
    split_work,
)
from eagleray.kernels.cuda.triton import mla
from eagleray.kernels.cuda.triton.attention import AttentionTiling
from eagleray.kernels.cuda.triton.decode_attention import SplitWorkspace
from eagleray.kernels.cuda.triton.mla import (
    attend_latent_decodes,
    attend_latent_tiles,
    latent_queries_per_tile,
    mla_tiling,
    write_latents,
)
from eagleray.kernels.params import MLAParams
from eagleray.kernels.torch import attention as torch_attention
from eagleray.kernels.torch.attention import DeviceBatch, ForwardContext
from eagleray.kernels.torch.mla import LatentAttention

RANK, ROTATED = 20, 6
SCALE = 0.3
SMALL = AttentionTiling(queries=16, keys=16, num_warps=4, num_stages=1)


def naive(absorbed: torch.Tensor, cache: torch.Tensor, batch: PagedBatch, rank: int = RANK) -> torch.Tensor:
    """Compute the sums of latents of absorbed queries, one query at a time, in float64."""
    out = torch.full((*absorbed.shape[:2], rank), torch.nan, dtype=torch.float64)
    for row in range(len(batch.seq_lens)):
        cached = cache.flatten(0, 1)[batch.slots(row)].double()
        first, last = batch.query_start_loc[row : row + 2].tolist()
        for token in range(first, last):
            seen = cached[: len(cached) - (last - token) + 1]
            out[token] = torch.softmax(absorbed[token].double() @ seen.T * SCALE, 1) @ seen[:, :rank]
    return out


def attend_tiles(absorbed, cache, batch: PagedBatch, rank: int = RANK) -> torch.Tensor:
    num_heads = absorbed.shape[1]
    out = torch.full((*absorbed.shape[:2], rank), torch.nan, dtype=absorbed.dtype)
    per_tile = latent_queries_per_tile(num_heads, SMALL)
    tiles = torch.from_numpy(query_tiles(batch.query_start_loc.numpy(), batch.seq_lens.numpy(), per_tile))
    tiles = torch.cat((tiles, torch.full((1, 2), -1, dtype=torch.int32)))
    arguments = batch.block_table, batch.seq_lens, batch.query_start_loc, tiles, out
    attend_latent_tiles(absorbed, cache, *arguments, scale=SCALE, tiling=SMALL)
    return out


def attend_decodes(absorbed, cache, batch: PagedBatch, rank=RANK, split_keys=32, max_splits=4, num_programs=3):
    num_rows, num_heads = absorbed.shape[:2]
    found, row_starts = split_work(batch.seq_lens.numpy(), None, split_keys, max_splits)
    capacity = max_split_work(num_rows, int(batch.seq_lens.max()), split_keys, max_splits)
    work = torch.full((capacity, 2), 1 << 30, dtype=torch.int32)
    work[: len(found)] = torch.from_numpy(found)
    shape = capacity, num_heads, rank
    out = torch.full((num_rows, num_heads, rank), torch.nan, dtype=absorbed.dtype)
    attend_latent_decodes(
        absorbed,
        cache,
        batch.block_table,
        batch.seq_lens,
        work,
        torch.tensor([len(found)], dtype=torch.int32),
        torch.from_numpy(row_starts),
        SplitWorkspace.of(torch.full((SplitWorkspace.num_floats(*shape),), torch.nan), *shape),
        out,
        scale=SCALE,
        tiling=SMALL,
        num_programs=num_programs,
        split_keys=split_keys,
        max_splits=max_splits,
    )
    return out


ROWS = st.one_of(
    st.tuples(st.integers(0, 50), st.just(1)),
    st.tuples(st.just(0), st.integers(1, 20)),
    st.tuples(st.integers(1, 35), st.integers(2, 8)),
    st.just((0, 0)),
)


@settings(max_examples=8)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    block_size=st.sampled_from([1, 5, 16]),
    num_heads=st.sampled_from([1, 3, 16, 20]),
)
@example([(15, 3), (0, 0), (0, 17)], 16, 3)
@example([(16, 2)], 5, 20)
def test_attend_latent_tiles_any_batch_equals_float64(rows, block_size, num_heads):
    batch = paged_batch(rows, block_size)
    cache = poisoned_cache(batch, block_size, RANK + ROTATED)
    absorbed = torch.randn(batch.num_tokens, num_heads, RANK + ROTATED)
    out = attend_tiles(absorbed, cache, batch)
    torch.testing.assert_close(out.double(), naive(absorbed, cache, batch), atol=1e-5, rtol=0)


@settings(max_examples=8)
@given(
    contexts=st.lists(st.sampled_from([0, 1, 16, 31, 32, 33, 64, 65, 96, 97, 100]), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 5, 16]),
    num_heads=st.sampled_from([1, 3, 16, 20]),
)
@example([100, 0, 32], 16, 20)
def test_attend_latent_decodes_any_batch_equals_float64(contexts, block_size, num_heads):
    batch = paged_batch([(context - 1, 1) if context else (0, 0) for context in contexts], block_size)
    cache = poisoned_cache(batch, block_size, RANK + ROTATED)
    absorbed = torch.full((len(contexts), num_heads, RANK + ROTATED), torch.nan)
    real = batch.seq_lens > 0
    absorbed[real] = torch.randn(batch.num_tokens, num_heads, RANK + ROTATED)
    out = attend_decodes(absorbed, cache, batch)
    torch.testing.assert_close(out[real].double(), naive(absorbed[real], cache, batch), atol=1e-5, rtol=0)
    assert out[~real].isnan().all(), "padded rows are left alone"


def test_attend_latents_real_size_equals_float64():
    batch = paged_batch([(39, 1)], 16)
    cache = poisoned_cache(batch, 16, 576, dtype=torch.float16)
    absorbed = torch.randn(1, 16, 576).half() / 4
    expected = naive(absorbed, cache, batch, 512)
    for attend in (attend_tiles, attend_decodes):
        torch.testing.assert_close(attend(absorbed, cache, batch, 512).double(), expected, atol=4e-3, rtol=0)


def test_attend_latents_float8_cache_equals_float64():
    batch = paged_batch([(39, 1), (3, 1)], 16)
    cache = poisoned_cache(batch, 16, RANK + ROTATED).nan_to_num(0.0).to(torch.float8_e4m3fn)
    absorbed = torch.randn(2, 3, RANK + ROTATED)
    expected = naive(absorbed, cache.float(), batch)
    for attend in (attend_tiles, attend_decodes):
        torch.testing.assert_close(attend(absorbed, cache, batch).double(), expected, atol=1e-5, rtol=0)


def test_attend_latent_decodes_row_has_same_bits_in_any_batch_and_grid():
    batch = paged_batch([(99, 1), (200, 1), (11, 1), (0, 0)], 4)
    cache = poisoned_cache(batch, 4, RANK + ROTATED)
    absorbed = torch.randn(4, 20, RANK + ROTATED)
    expected = attend_decodes(absorbed, cache, batch, num_programs=1)
    for num_programs in (4, 64):
        assert torch.equal(attend_decodes(absorbed, cache, batch, num_programs=num_programs)[:3], expected[:3])
    for row in range(3):
        part = slice(row, row + 1)
        alone = PagedBatch(batch.block_table[part], batch.seq_lens[part], batch.query_start_loc, 0, [])
        assert torch.equal(attend_decodes(absorbed[part].contiguous(), cache, alone)[0], expected[row])


def test_attend_latent_tiles_query_has_same_bits_in_any_tile(monkeypatch):
    monkeypatch.setattr(np, "matmul", ordered_matmul)
    whole = paged_batch([(0, 40), (5, 3)], 4)
    cache = poisoned_cache(whole, 4, RANK + ROTATED)
    absorbed = torch.randn(whole.num_tokens, 3, RANK + ROTATED)
    expected = attend_tiles(absorbed, cache, whole)[:40]
    for cached in (17, 39):
        starts = torch.tensor([0, 40 - cached], dtype=torch.int32)
        part = PagedBatch(whole.block_table[:1], whole.seq_lens[:1], starts, whole.num_blocks, [])
        assert torch.equal(attend_tiles(absorbed[cached:40].contiguous(), cache, part), expected[cached:])


@pytest.mark.parametrize("num_heads", [1, 3, 9])
def test_mla_kernels_whole_layer_equals_torch(num_heads):
    """The products around the kernels are those that the module describes. The batch has a prompt, a later chunk of
    another, and a padded token."""
    plain_dim, value_dim, block_size = 6, 10, 4
    batch = paged_batch([(0, 9), (14, 4)], block_size)
    num_tokens = batch.num_tokens
    params = MLAParams(
        num_heads=num_heads,
        plain_dim=plain_dim,
        rotated_dim=ROTATED,
        value_dim=value_dim,
        scale=SCALE,
        norm=torch.rand(RANK) + 0.5,
        norm_eps=1e-6,
        keys=torch.randn(num_heads, plain_dim, RANK),
        values=torch.randn(num_heads, value_dim, RANK),
    )
    positions = torch.tensor([*range(9), *range(14, 18)])
    slots = torch.tensor([*batch.slots(0), *batch.slots(1)[14:]])
    queries = torch.randn(num_tokens + 1, num_heads * (plain_dim + ROTATED))
    latents = torch.randn(num_tokens + 1, RANK + ROTATED + 3)[:, : RANK + ROTATED]
    cache = poisoned_cache(batch, block_size, RANK + ROTATED)
    reference_cache = cache.nan_to_num(0.0)
    angles = torch.arange(18)[:, None] * torch.tensor([1.0, 0.3, 0.1])
    cos, sin = angles.cos(), angles.sin()

    device_batch = DeviceBatch(
        token_ids=positions,
        positions=positions,
        slot_mapping=slots,
        block_table=batch.block_table.long(),
        seq_lens=batch.seq_lens.tolist(),
        query_lens=[9, 4],
        num_decodes=0,
    )
    context = ForwardContext(
        cos=torch.cat((cos, cos), 1)[positions, None],
        sin=torch.cat((-sin, sin), 1)[positions, None],
        slot_mapping=slots,
        metadata={None: torch_attention.build_attention_metadata(device_batch, reference_cache, None)},
    )
    expected = LatentAttention(params)(queries[:-1].clone(), latents[:-1].clone(), reference_cache, context)

    absorbed = torch.full((num_tokens + 1, num_heads, RANK + ROTATED), torch.nan)
    write_latents(
        latents,
        queries,
        params.norm,
        params.norm_eps,
        cos,
        sin,
        torch.cat((positions, torch.tensor([1 << 20]))).int(),
        torch.cat((slots, torch.tensor([-1]))).int(),
        cache,
        absorbed,
    )
    plain = queries.unflatten(1, (num_heads, -1))[..., :plain_dim]
    absorbed[..., :RANK] = torch.bmm(plain.transpose(0, 1), params.keys).transpose(0, 1)
    found = attend_tiles(absorbed, cache, batch)[:-1]
    out = torch.bmm(found.transpose(0, 1), params.values.transpose(1, 2)).transpose(0, 1)
    torch.testing.assert_close(out.flatten(1), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(cache.nan_to_num(0.0), reference_cache, atol=1e-6, rtol=1e-6)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("kind", "num_heads", "types", "capability"),
    [
        ("splits", 16, ("bf16", "bf16"), 90),
        ("tiles", 16, ("bf16", "bf16"), 90),
        *(
            pytest.param(*case, marks=pytest.mark.grid)
            for case in (
                ("splits", 128, ("bf16", "bf16"), 80),
                ("tiles", 16, ("bf16", "bf16"), 100),
                ("tiles", 16, ("fp16", "fp8e4nv"), 90),
                *(("splits", 16, ("bf16", "bf16"), capability) for capability in (80, 100)),
                ("tiles", 16, ("bf16", "bf16"), 80),
                ("splits", 128, ("bf16", "bf16"), 90),
                ("tiles", 128, ("bf16", "bf16"), 90),
                ("splits", 20, ("bf16", "bf16"), 90),
                ("splits", 16, ("bf16", "fp8e4nv"), 90),
                ("splits", 16, ("fp32", "fp32"), 90),
            )
        ),
    ],
)
def test_attend_latents_kernel_compiles(tmp_path, kind, num_heads, types, capability):
    num_vectors = num_heads if kind == "splits" else 1 << 10
    tiling = mla_tiling(num_vectors, *(DTYPES[name] for name in types), capability)
    signature = {"absorbed": f"*{types[0]}", "cache": f"*{types[1]}", "out": f"*{types[0]}", "score_scale": "fp32"}
    signature |= {"block_table": "*i32", "seq_lens": "*i32", "block_table_stride": "i32"}
    constants = {"NUM_HEADS": num_heads, "RANK": 512, "WIDTH": 576, "BLOCK_SIZE": 16, "BLOCK_R": 512, "BLOCK_P": 64}
    constants |= {"BLOCK_M": tiling.queries, "BLOCK_N": tiling.keys}
    if kind == "splits":
        signature |= dict.fromkeys(("work", "num_work"), "*i32") | dict.fromkeys(("totals", "maxima", "sums"), "*fp32")
        constants |= {"SPLIT_KEYS": latent_split_keys(num_heads), "MAX_SPLITS": MAX_SPLITS}
    else:
        signature |= dict.fromkeys(("query_start_loc", "tiles"), "*i32")
        constants |= {"QUERIES": latent_queries_per_tile(num_heads, tiling)}
    compiled = compile_kernel(
        getattr(mla, f"_attend_latent_{kind}_kernel"),
        signature,
        constants,
        capability=capability,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        disassemble=tiling.queries >= 64,
        directory=tmp_path,
    )
    assert compiled.shared_bytes <= (MAX_SHARED_BYTES if capability == 90 else 99 * 1024)
    assert not compiled.spills
    assert tiling.queries < 64 or "HGMMA" in compiled.instructions


@pytest.mark.parametrize("capability", HOPPER_FIRST)
@pytest.mark.parametrize("cache_type", ["bf16", "fp8e4nv"])
def test_write_latents_kernel_compiles(tmp_path, capability, cache_type):
    if capability < 89 and cache_type == "fp8e4nv":
        pytest.skip("Triton converts to float8_e4m3fn from capability 8.9 on")
    signature = dict.fromkeys(("latents", "queries", "norm", "absorbed"), "*bf16") | {"cache": f"*{cache_type}"}
    signature |= dict.fromkeys(("latents_stride", "queries_stride", "num_positions"), "i32") | {"eps": "fp32"}
    signature |= {"cos": "*fp32", "sin": "*fp32", "positions": "*i32", "slot_mapping": "*i32"}
    constants = {"NUM_HEADS": 16, "PLAIN_DIM": 128, "ROTATED_DIM": 64, "RANK": 512}
    constants |= {"HEADS": 8, "HALF_PADDED": 32, "RANK_PADDED": 512}
    compiled = compile_kernel(
        mla._write_latents_kernel,
        signature,
        constants,
        capability=capability,
        num_warps=4,
        num_stages=3,
        directory=tmp_path,
    )
    assert not compiled.spills
