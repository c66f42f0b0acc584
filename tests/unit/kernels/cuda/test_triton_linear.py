"""Products with quantized weights equal those with dequantized ones, and compile for real models and every GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized_weights import FORMATS, dequantized, random_weight
from torch import Tensor
from triton_compile import MAX_SHARED_BYTES, compile_kernel

from eagleray.kernels.cuda.triton import linear as module
from eagleray.kernels.cuda.triton.gate import gate_constants
from eagleray.kernels.cuda.triton.linear import linear_config, quantized_gated_linear, quantized_linear
from eagleray.kernels.cuda.triton.tile_product import FP8, MXFP4, scale_constants
from eagleray.kernels.params import ClampedSwiglu
from eagleray.kernels.quantized import Fp8Weight, Mxfp4Weight
from eagleray.kernels.torch.functional import clamped_swiglu, silu_and_mul
from eagleray.models import mxfp4

CLAMP = ClampedSwiglu(alpha=1.702, limit=0.8)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


def strided(x: Tensor) -> Tensor:
    """Return the same numbers between rows and columns of NaN."""
    memory = torch.full((len(x) + 2, x.shape[1] + 16), torch.nan, dtype=x.dtype)
    memory[1:-1, : x.shape[1]] = x
    return memory[1:-1, : x.shape[1]]


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = expected.abs().max()
    torch.testing.assert_close(found.double() / scale, expected / scale, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "columns", "rows"), [(1, 32, 24), (17, 160, 72), (70, 288, 136)])
def test_quantized_linear_equals_dequantized_weights(
    kind: str, dtype: torch.dtype, num_tokens: int, columns: int, rows: int
) -> None:
    torch.manual_seed(0)
    weight, bias = random_weight(kind, (rows, columns), dtype), torch.randn(rows).to(dtype)
    x, out = strided(torch.randn(num_tokens, columns).to(dtype)), strided(torch.zeros(num_tokens, rows).to(dtype))
    expected = x.double() @ dequantized(weight, dtype).T + bias.double()
    quantized_linear(x, weight, bias, out=out.fill_(torch.nan))
    check(out, expected, dtype)


@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_quantized_gated_linear_equals_torch(clamp: ClampedSwiglu | None) -> None:
    torch.manual_seed(0)
    weight, bias = random_weight("fp8", (2 * 69, 64), torch.float32), torch.randn(2 * 69)
    x, out = torch.randn(3, 64) * 0.1, torch.full((3, 69), torch.nan)
    gate_up = x.double() @ dequantized(weight, torch.float32).T + bias
    quantized_gated_linear(x, weight, bias, clamp, out=out)
    check(out, silu_and_mul(gate_up) if clamp is None else clamped_swiglu(gate_up, clamp), torch.float32)


@pytest.mark.parametrize("group", [1, 2, 8])
def test_quantized_linear_every_tile_is_computed(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILES_OF_A_GROUP", group)
    weight, x, out = torch.randn(70, 24), torch.randn(390, 24), torch.full((390, 70), torch.nan)
    quantized_linear(x, weight, out=out)
    check(out, x.double() @ weight.double().T, torch.float32)


def test_quantized_linear_rows_do_not_depend_on_others() -> None:
    torch.manual_seed(0)
    weight, x = random_weight("mxfp4", (40, 160), torch.float16), torch.randn(40, 160).half()
    whole, alone = (torch.full((40, 40), torch.nan, dtype=torch.float16) for _ in range(2))
    quantized_linear(x, weight, out=whole)
    x[1] = torch.nan
    quantized_linear(x[:1], weight, out=alone[:1])
    quantized_linear(x[:20], weight, out=alone[:20])
    torch.testing.assert_close(alone[0], whole[0], rtol=1e-3, atol=1e-3)
    assert alone[1].isnan().all()
    assert alone[2:20].isfinite().all()


def test_dequantize_mxfp4_equals_the_checkpoints() -> None:
    weight = random_weight("mxfp4", (5, 96), torch.float32)
    assert isinstance(weight, Mxfp4Weight)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(weight.dequantize(dtype), mxfp4.decode(weight.blocks, weight.scales, dtype))


def test_dequantize_fp8_scales_partial_blocks() -> None:
    values = torch.full((2, 3, 5), 2.0).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 13.0).view(2, 2, 3)
    expected = 2 * scales.repeat_interleave(2, 1)[:, :3].repeat_interleave(2, 2)[:, :, :5]
    assert torch.equal(Fp8Weight(values, scales, (2, 2)).dequantize(torch.float32), expected)


# ---- compilation

NOTHING = torch.empty(0)


def fp8(rows: int, columns: int) -> Fp8Weight:
    return Fp8Weight(torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="meta"), NOTHING, (128, 128))


def mxfp4_weight(rows: int, columns: int) -> Mxfp4Weight:
    return Mxfp4Weight(NOTHING, torch.empty(rows, columns // 32, dtype=torch.uint8, device="meta"))


@pytest.mark.parametrize(
    ("capability", "numbers"),
    [
        (90, [16]),
        *(pytest.param(*case, marks=pytest.mark.grid) for case in ((80, [16]), (90, [32, 64, 128]), (100, [16]))),
    ],
)
def test_quantized_linear_compiles(capability: int, numbers: list[int], tmp_path: Path) -> None:
    weights = [(fp8(4096, 4096), False), (fp8(24576, 4096), True), (mxfp4_weight(2880, 2880), False)]
    for weight, gated in weights:
        rows, columns = weight.shape
        is_fp8 = isinstance(weight, Fp8Weight)
        words = -(-columns // 128)
        scales = scale_constants(FP8, 128, 128, words) if is_fp8 else scale_constants(MXFP4, 1, 32, words)
        values = "*fp8e4nv" if is_fp8 and capability >= 89 else "*u8"
        signature = {"x": "*bf16", "values": values, "scales": "*fp32" if is_fp8 else "*i32", "bias": "*bf16"}
        signature |= {"out": "*bf16", "num_tokens": "i32"}
        flags = {"HAS_BIAS": not is_fp8, "GATED": gated}
        strides = {"X_STRIDE": columns, "OUT_STRIDE": rows // 2 if gated else rows}
        for num_tokens in numbers:
            config = linear_config(num_tokens, weight, torch.bfloat16)
            compiled = compile_kernel(
                module._linear,
                signature,
                {**flags, **strides, **gate_constants(None), **scales, **config.constants}
                | {"N": rows, "K": columns, "GROUP": module.TILES_OF_A_GROUP},
                capability=capability,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                disassemble=capability == 90,
                directory=tmp_path,
            )
            assert compiled.shared_bytes <= MAX_SHARED_BYTES
            if capability == 90:
                assert not compiled.spills
                assert "LDGSTS" in compiled.instructions
                assert ("HGMMA" if config.rows >= 64 else "HMMA") in compiled.instructions


@pytest.mark.grid
@pytest.mark.parametrize("block_rows", [1, 64])
def test_quantized_linear_with_scales_of_fewer_rows_compiles(block_rows: int, tmp_path: Path) -> None:
    """Weights that were joined or cut within blocks have these."""
    rows = columns = 4096
    signature = {"x": "*bf16", "values": "*fp8e4nv", "scales": "*fp32", "bias": "*bf16", "out": "*bf16"}
    flags = {"HAS_BIAS": False, "GATED": False, "GROUP": 8}
    sizes = {"X_STRIDE": columns, "OUT_STRIDE": rows, "N": rows, "K": columns}
    for num_tokens in (1, 128):
        config = linear_config(num_tokens, fp8(rows, columns), torch.bfloat16)
        compiled = compile_kernel(
            module._linear,
            signature | {"num_tokens": "i32"},
            {**flags, **sizes, **gate_constants(None), **scale_constants(FP8, block_rows, 128, 32), **config.constants},
            capability=90,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            directory=tmp_path,
        )
        assert compiled.shared_bytes <= MAX_SHARED_BYTES and not compiled.spills
