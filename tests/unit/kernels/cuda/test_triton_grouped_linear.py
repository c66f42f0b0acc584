"""Products with the weights of slots equal those of dequantized weights, and compile for real models and every GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_weights import FORMATS, dequantized, random_weight
from torch import Tensor
from triton_compile import MAX_SHARED_BYTES, compile_kernel

from eagleray.kernels.cuda.triton import grouped_linear as module
from eagleray.kernels.cuda.triton.gate import gate_constants
from eagleray.kernels.cuda.triton.grouped_linear import grouped_gated_linear, grouped_linear, pair_tile
from eagleray.kernels.cuda.triton.routing import PairTiles, align
from eagleray.kernels.cuda.triton.tile_product import FP8, MXFP4, PLAIN, scale_constants, tile_config
from eagleray.kernels.params import ClampedSwiglu
from eagleray.kernels.quantized import Fp8Weight, Mxfp4Weight, Weight
from eagleray.kernels.torch.functional import clamped_swiglu, silu_and_mul

CLAMP = ClampedSwiglu(alpha=1.702, limit=0.8)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


def random_slots(num_tokens: int, top_k: int, num_slots: int) -> Tensor:
    """Return slots [num_tokens, top_k] without the last slot. Some pairs have none, nor has the last token."""
    slots = torch.rand(num_tokens, num_slots - 1).argsort(dim=1)[:, :top_k].int()
    slots[torch.rand(slots.shape) < 0.2] = -1
    slots[0, 0], slots[-1] = 1, -1
    return slots.contiguous()


def aligned(slots: Tensor, num_slots: int, tile: int) -> PairTiles:
    tiles = PairTiles.empty(slots.numel(), num_slots, tile, slots.device)
    for memory in (tiles.sorted_pairs, tiles.tile_slot):
        memory.fill_(1 << 30)
    align(slots, num_slots, tiles, torch.empty(0, dtype=torch.int32))
    return tiles


def strided(x: Tensor) -> Tensor:
    """Return the same numbers with NaN between the rows."""
    memory = torch.full((len(x), x.shape[1] + 16), torch.nan, dtype=x.dtype)
    memory[:, : x.shape[1]] = x
    return memory[:, : x.shape[1]]


def products(x: Tensor, slots: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return float64 [num_pairs, rows], where `x` has a row for each pair."""
    chosen = slots.flatten().long().clamp(min=0)
    result = torch.einsum("pk,pnk->pn", x.double(), weight[chosen])
    return result if bias is None else result + bias.double()[chosen]


def check(found: Tensor, expected: Tensor, slots: Tensor) -> None:
    is_pair = slots.flatten() >= 0
    scale = expected[is_pair].abs().max()
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found[is_pair].double() / scale, expected[is_pair] / scale, rtol=0, atol=tolerance)
    assert found[~is_pair].isnan().all(), "rows of pairs without a slot are not written"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("columns", "rows"), [(32, 24), pytest.param(160, 72, marks=pytest.mark.grid), (288, 136)])
def test_grouped_linear_equals_dequantized_weights(kind: str, dtype: torch.dtype, columns: int, rows: int) -> None:
    torch.manual_seed(0)
    weight, slots = random_weight(kind, (4, rows, columns), dtype), random_slots(3, 2, 4)
    x, bias = strided(torch.randn(6, columns).to(dtype)), torch.randn(4, rows).to(dtype)
    out = torch.full((6, rows), torch.nan, dtype=dtype)
    grouped_linear(x, weight, bias, aligned(slots, 4, 16), out=out)
    check(out, products(x, slots, dequantized(weight, dtype), bias), slots)


def test_grouped_linear_columns_that_are_no_multiple_equal_torch() -> None:
    torch.manual_seed(0)
    for kind in ("plain", "fp8", "fp8 rows"):
        weight, slots, x = random_weight(kind, (3, 20, 44), torch.float32), random_slots(4, 1, 3), torch.randn(4, 44)
        out = torch.full((4, 20), torch.nan)
        grouped_linear(x, weight, None, aligned(slots, 3, 16), out=out)
        check(out, products(x, slots, dequantized(weight, torch.float32), None), slots)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_grouped_gated_linear_equals_torch(kind: str, clamp: ClampedSwiglu | None) -> None:
    torch.manual_seed(0)
    weight, slots = random_weight(kind, (4, 2 * 37, 64), torch.float32), random_slots(5, 3, 4)
    x, bias = strided(torch.randn(5, 64) * 0.1), torch.randn(4, 2 * 37)
    out = torch.full((15, 37), torch.nan)
    tiles = aligned(slots, 4, 16)
    grouped_gated_linear(x, weight, bias, clamp, tiles, top_k=3, out=out)
    gate_up = products(x.repeat_interleave(3, dim=0), slots, dequantized(weight, torch.float32), bias)
    check(out, silu_and_mul(gate_up) if clamp is None else clamped_swiglu(gate_up, clamp), slots)


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_grouped_linear_every_tile_gives_the_same_numbers(tile: int) -> None:
    torch.manual_seed(0)
    weight, slots = random_weight("mxfp4", (3, 40, 160), torch.float16), random_slots(30, 1, 3)
    x = torch.randn(30, 160).half()
    small, large = (torch.full((30, 40), torch.nan, dtype=torch.float16) for _ in range(2))
    grouped_linear(x, weight, None, aligned(slots, 3, 16), out=small)
    grouped_linear(x, weight, None, aligned(slots, 3, tile), out=large)
    torch.testing.assert_close(large, small, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_grouped_linear_nan_stays_in_its_token() -> None:
    weight, slots = random_weight("plain", (2, 24, 32), torch.float32), torch.zeros(3, 1, dtype=torch.int32)
    x, out = torch.randn(3, 32), torch.zeros(3, 24)
    x[0] = torch.nan
    grouped_linear(x, weight, None, aligned(slots, 2, 16), out=out)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_fp8_every_number_is_decoded(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    values = codes.view(torch.float8_e4m3fn).repeat_interleave(32).view(1, 256, 32)
    x = torch.zeros(1, 32, dtype=dtype)
    x[0, 5] = 1
    weight, out = Fp8Weight(values, torch.ones(1, 2, 1), (128, 128)), torch.full((1, 256), torch.nan, dtype=dtype)
    grouped_linear(x, weight, None, aligned(torch.zeros(1, 1, dtype=torch.int32), 1, 16), out=out)
    assert torch.equal(out[0].float(), codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(
    ("dtype", "exponents"), [(torch.float32, (70, 113, 127, 160)), (torch.float16, (113, 127, 128))]
)
def test_mxfp4_every_number_is_decoded(dtype: torch.dtype, exponents: tuple[int, ...]) -> None:
    for exponent in exponents:
        check_mxfp4(dtype, exponent)


def check_mxfp4(dtype: torch.dtype, exponent: int) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(1, 256, 1, 16)
    storage = torch.full((1, 256, 4), 255, dtype=torch.uint8)
    storage[..., 0] = exponent
    weight = Mxfp4Weight(blocks, storage[..., :1])
    x = torch.zeros(2, 32, dtype=dtype)
    x[0, 6] = x[1, 7] = 1  # the lower and the upper half of a byte
    out = torch.full((2, 256), torch.nan, dtype=dtype)
    grouped_linear(x, weight, None, aligned(torch.zeros(2, 1, dtype=torch.int32), 1, 16), out=out)
    assert torch.equal(out, weight.dequantize(dtype)[0, :, 6:8].T)


def test_pair_tile_grows_with_the_pairs_of_a_slot() -> None:
    tiles = [pair_tile(num_tokens * 8, 128) for num_tokens in (1, 64, 128, 256, 1024, 4096, 16384)]
    assert tiles == [16, 16, 16, 32, 64, 128, 128]


# ---- compilation

QWEN3_30B = 128, 2048, 768
GPT_OSS_20B = 32, 2880, 2880
DEEPSEEK_V3 = 256, 7168, 2048

NOTHING = torch.empty(0)
WEIGHTS: dict[int, Weight] = {
    PLAIN.value: NOTHING,
    FP8.value: Fp8Weight(NOTHING, NOTHING, (128, 128)),
    MXFP4.value: Mxfp4Weight(NOTHING, NOTHING),
}
VALUES = {PLAIN.value: "*bf16", FP8.value: "*fp8e4nv", MXFP4.value: "*u8"}
SCALES = {PLAIN.value: "*bf16", FP8.value: "*fp32", MXFP4.value: "*i32"}


def check_compiled_product(
    kind: int, model: tuple[int, int, int], tile: int, gated: bool, capability: int, directory: Path
) -> Any:
    """Compile the product as it is launched, and check the machine code."""
    _, hidden, inner = model
    rows, columns = (2 * inner, hidden) if gated else (hidden, inner)
    is_clamped = kind == MXFP4.value
    if kind == FP8.value:
        numbers = scale_constants(FP8, 128, 128, columns // 128, rows // 128 * columns // 128)
    elif kind == MXFP4.value:
        numbers = scale_constants(MXFP4, 1, 32, -(-columns // 128), rows * -(-columns // 128))
    else:
        numbers = scale_constants(PLAIN)
    config = tile_config(tile, WEIGHTS[kind], torch.bfloat16)
    values = "*u8" if capability < 89 and kind == FP8.value else VALUES[kind]
    signature = {"x": "*bf16", "values": values, "scales": SCALES[kind], "bias": "*bf16", "out": "*bf16"}
    signature |= dict.fromkeys(("sorted_pairs", "tile_slot", "num_tiles"), "*i32")
    strides = {"X_STRIDE": columns, "OUT_STRIDE": inner if gated else hidden}
    constants = strides | {
        "HAS_BIAS": is_clamped,
        "TOP_K": 8 if gated else 1,
        "GATED": gated,
    }
    compiled = compile_kernel(
        module._grouped_linear,
        signature,
        constants
        | gate_constants(CLAMP if is_clamped else None)
        | {"N": rows, "K": columns}
        | numbers
        | config.constants,
        capability=capability,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        disassemble=capability == 90,
        directory=directory,
    )
    assert compiled.shared_bytes <= MAX_SHARED_BYTES
    if capability == 90:
        assert not compiled.spills
        assert "HGMMA" in compiled.instructions
        assert "LDGSTS" in compiled.instructions, "weights are on their way while others are multiplied"


MODELS = [(PLAIN.value, QWEN3_30B), (FP8.value, DEEPSEEK_V3), (MXFP4.value, GPT_OSS_20B)]


@pytest.mark.parametrize(
    ("kind", "model"), [MODELS[0], *(pytest.param(*each, marks=pytest.mark.grid) for each in MODELS[1:])]
)
@pytest.mark.parametrize("tile", [16, *(pytest.param(tile, marks=pytest.mark.grid) for tile in (32, 64, 128))])
def test_grouped_linear_compiles_for_hopper(kind: int, model: tuple[int, int, int], tile: int, tmp_path: Path) -> None:
    for gated in (True, False) if tile in (16, 128) else (True,):
        check_compiled_product(kind, model, tile, gated, 90, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize(("kind", "model"), MODELS)
def test_grouped_linear_compiles(kind: int, model: tuple[int, int, int], capability: int, tmp_path: Path) -> None:
    check_compiled_product(kind, model, 16, True, capability, tmp_path)
    if kind != PLAIN.value:
        check_compiled_product(kind, model, 128, False, capability, tmp_path)
