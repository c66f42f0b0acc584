"""Weights that are quantized to FP8 when they are loaded, and rows of such weights."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from eagleray.kernels.quantized import FP8_BLOCK, MAX_FP8, quantize_fp8, select_rows

SIZES = st.integers(1, 300)


@given(rows=SIZES, columns=SIZES, seed=st.integers(0, 99))
def test_quantize_fp8_keeps_three_bits(rows, columns, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    before = weight.clone()
    quantized = quantize_fp8(weight)
    assert torch.equal(weight, before)
    assert quantized.block == FP8_BLOCK and quantized.scales.shape == (-(-rows // 128), -(-columns // 128))
    assert quantized.values.is_contiguous() and quantized.values.float().abs().max() == MAX_FP8
    smallest = float(weight.abs().max()) / MAX_FP8 * 2**-9
    torch.testing.assert_close(quantized.dequantize(torch.float32), weight.float(), rtol=2**-4, atol=smallest)


def test_quantize_fp8_block_has_its_own_scale():
    weight = torch.ones(256, 384)
    weight[:128, 128:256] = 2.0**-20
    weight[128:, 256:] = 0.0
    quantized = quantize_fp8(weight)
    assert torch.equal(quantized.dequantize(torch.float32), weight)
    assert quantized.scales[0, 1] == 2.0**-20 / MAX_FP8


@given(rows=SIZES, seed=st.integers(0, 99), step=st.sampled_from([1, 2, 32, 64, 128]))
def test_select_rows_equal_rows_of_the_dequantized_weight(rows, seed, step):
    generator = torch.Generator().manual_seed(seed)
    quantized = quantize_fp8(torch.randn(rows, 40, generator=generator))
    order = torch.arange(rows)
    order = torch.cat([part.flip(0) for part in order.split(step)]) if seed % 2 else order.roll(step)
    found = select_rows(quantized, order)
    assert torch.equal(found.dequantize(torch.float32), quantized.dequantize(torch.float32)[order])
    if seed % 2:
        assert found.block == quantized.block  # rows changed places within blocks only
