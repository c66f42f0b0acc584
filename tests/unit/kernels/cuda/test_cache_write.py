"""The kernel that writes keys and values to the cache against plain torch."""

from __future__ import annotations

import pytest
import torch
from triton_compile import HOPPER_FIRST, compile_kernel

from eagleray.kernels.cuda.triton import cache_write
from eagleray.kernels.cuda.triton.cache_write import write_keys_values
from eagleray.kernels.rope import Rope
from eagleray.kernels.rope_spec import DefaultRope
from eagleray.kernels.torch.attention import write_cache
from eagleray.kernels.torch.functional import rms_norm, rotate

EPS = 1e-6
MAX_POSITIONS = 50


def rope_tables(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    rope = Rope(DefaultRope(100.0), head_dim, dtype=torch.float32, device=torch.device("cpu"))
    return rope.table(torch.arange(MAX_POSITIONS))


def reference(qkv, cos, sin, positions, slots, cache, num_heads, q_norm, k_norm):
    """Return queries and cache in float32, where tokens with slot -1 are not written."""
    num_kv_heads, head_dim = cache.shape[2] // 2, cache.shape[3]
    split = qkv.float().unflatten(1, (-1, head_dim)).clone()
    rotated = split[:, : num_heads + num_kv_heads]
    if q_norm is not None:
        weights = torch.stack([q_norm] * num_heads + [k_norm] * num_kv_heads).float()
        rotated.copy_(rms_norm(rotated, weights, EPS))
    c, s = cos[positions], sin[positions]
    rotate(rotated, torch.cat((c, c), 1)[:, None], torch.cat((-s, s), 1)[:, None], out=rotated)
    cache, is_written = cache.float().clone(), slots >= 0
    write_cache(split[is_written, num_heads:], cache, slots[is_written].long())
    return split[:, :num_heads].flatten(1), cache


def random_case(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype):
    size = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.full((num_tokens, size + 5), torch.nan, dtype=dtype)[:, 2 : size + 2]
    qkv.copy_(torch.randn(num_tokens, size) * 2)
    positions = torch.randint(MAX_POSITIONS, (num_tokens,), dtype=torch.int32)
    slots = torch.randperm(24)[:num_tokens].int()
    slots[1::3] = -1
    return qkv, positions, slots


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "has_norm", "dtype", "cache_dtype"),
    [
        (4, 2, 16, True, torch.float32, torch.float32),
        (7, 1, 80, False, torch.float32, torch.float32),
        (3, 3, 6, True, torch.float16, torch.float16),
        (10, 2, 64, True, torch.float32, torch.bfloat16),
        (1, 1, 2, False, torch.float16, torch.float32),
    ],
)
def test_write_keys_values_any_shape_equals_torch(num_heads, num_kv_heads, head_dim, has_norm, dtype, cache_dtype):
    qkv, positions, slots = random_case(7, num_heads, num_kv_heads, head_dim, dtype)
    q_norm, k_norm = (torch.randn(head_dim), torch.randn(head_dim)) if has_norm else (None, None)
    cos, sin = rope_tables(head_dim)
    cache = torch.randn(6, 4, 2 * num_kv_heads, head_dim).to(cache_dtype)
    queries, expected = reference(qkv, cos, sin, positions, slots, cache, num_heads, q_norm, k_norm)
    before = cache.clone()
    out = torch.full_like(queries, torch.nan, dtype=dtype)
    write_keys_values(qkv, cos, sin, positions, slots, cache, out, q_norm=q_norm, k_norm=k_norm, eps=EPS)
    limits = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
    torch.testing.assert_close(out.float(), queries, atol=1e-5, rtol=limits[dtype])
    torch.testing.assert_close(cache.float(), expected, atol=1e-5, rtol=limits[cache_dtype])
    untouched = torch.ones(24, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert torch.equal(cache.flatten(0, 1)[untouched].float(), before.flatten(0, 1)[untouched].float())


def test_write_keys_values_padded_token_beyond_table_writes_no_cache():
    qkv, _, _ = random_case(3, 2, 1, 8, torch.float32)
    cos, sin = rope_tables(8)
    cache = torch.full((2, 4, 2, 8), torch.nan)
    out = torch.empty(3, 16)
    positions = torch.tensor([3, 1 << 30, -5], dtype=torch.int32)
    write_keys_values(qkv, cos, sin, positions, torch.tensor([2, -1, -1], dtype=torch.int32), cache, out)
    written = cache.flatten(0, 1).isfinite().flatten(1)
    assert written[2].all() and written.sum() == 16


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_write_keys_values_float16_overflow_becomes_finite():
    qkv = torch.tensor([[1.0, 1, torch.inf, -torch.inf, torch.nan, 70000.0]])
    cos, sin = torch.ones(1, 1), torch.zeros(1, 1)
    cache = torch.zeros(1, 1, 2, 2, dtype=torch.float16)
    position = torch.zeros(1, dtype=torch.int32)
    write_keys_values(qkv, cos, sin, position, position, cache, torch.empty(1, 2))
    assert cache.flatten()[2:].tolist() == [0, 65504]
    assert cache.isfinite().all()


def test_write_keys_values_float8_cache_keeps_its_numbers():
    """The interpreter rounds to float8 wrongly, so the numbers are such that need no rounding."""
    numbers = torch.randn(5, 6 * 16).to(torch.float8_e4m3fn)
    cos, sin = torch.ones(1, 8), torch.zeros(1, 8)
    cache = torch.zeros(2, 3, 2, 16).to(torch.float8_e4m3fn)
    slots = torch.tensor([4, 0, -1, 5, 2], dtype=torch.int32)
    write_keys_values(
        numbers.half(), cos, sin, torch.zeros(5, dtype=torch.int32), slots, cache, torch.empty(5, 64).half()
    )
    cached = numbers.float()[:, 64:].unflatten(1, (2, 16))
    expected = torch.stack([cached[1], torch.zeros(2, 16), cached[4], torch.zeros(2, 16), cached[0], cached[3]])
    assert torch.equal(cache.float().flatten(0, 1), expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_write_keys_values_float8_overflow_becomes_largest():
    qkv = torch.tensor([[1.0, 1, 449, -1e9, torch.inf, -torch.inf]])
    cos, sin = torch.ones(1, 1), torch.zeros(1, 1)
    cache = torch.zeros(1, 1, 2, 2, dtype=torch.float8_e4m3fn)
    position = torch.zeros(1, dtype=torch.int32)
    write_keys_values(qkv, cos, sin, position, position, cache, torch.empty(1, 2))
    assert cache.flatten().tolist() == [448, -448, 448, -448]


@pytest.mark.parametrize("capability", HOPPER_FIRST)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "has_norm", "types"),
    [
        (32, 8, 128, True, ("bf16", "bf16")),
        (64, 8, 64, False, ("bf16", "fp8e4nv")),
        (28, 4, 80, True, ("fp32", "fp16")),
    ],
)
def test_write_keys_values_kernel_compiles(tmp_path, capability, num_heads, num_kv_heads, head_dim, has_norm, types):
    if capability < 89 and "fp8e4nv" in types:
        pytest.skip("Triton converts to float8_e4m3fn from capability 8.9 on")
    signature = {"qkv": f"*{types[0]}", "qkv_stride": "i32", "num_positions": "i32", "eps": "fp32"}
    signature |= {"cos": "*fp32", "sin": "*fp32", "positions": "*i32", "slot_mapping": "*i32"}
    signature |= {"out_queries": "*bf16", "cache": f"*{types[1]}"}
    norms = dict.fromkeys(("q_norm", "k_norm"))
    if has_norm:
        signature |= dict.fromkeys(norms, "*bf16")
    constants = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "HAS_NORM": has_norm}
    constants |= {"HEADS": cache_write.HEADS_PER_PROGRAM, "HALF_PADDED": 64} | ({} if has_norm else norms)
    compiled = compile_kernel(
        cache_write._write_keys_values_kernel,
        signature,
        constants,
        capability=capability,
        num_warps=4,
        num_stages=3,
        directory=tmp_path,
    )
    assert not compiled.spills
