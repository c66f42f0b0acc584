"""Quantized weights and caches on a GPU: models equal their decoded twins in plain torch on a CPU."""

from __future__ import annotations

import pytest
import torch
from checkpoints import make_checkpoint
from harness import random_prompt
from model_runs import load, logits_in_chunks
from quantized_checkpoints import pack_mxfp4, write_fp8_checkpoint

from eagleray.kernels.quantized import quantize_fp8

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device of compute capability 8.9",
    ),
]

PROMPT = random_prompt(0, 90, 384)
BLOCK = (128, 128)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_forward_fp8_weights_on_gpu_equal_decoded_ones_on_a_cpu(family, tmp_path):
    small, plain = write_fp8_checkpoint(tmp_path / "plain", family, tmp_path / "small", BLOCK)
    model, expected = load(small, device=CUDA), logits_in_chunks(load(plain), PROMPT, 90)
    for chunk in (90, 16, 1):
        torch.testing.assert_close(logits_in_chunks(model, PROMPT, chunk), expected, atol=2e-4, rtol=0)


def test_forward_mxfp4_experts_on_gpu_equal_decoded_ones_on_a_cpu(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "gpt_oss", tokenizer=False)
    pack_mxfp4(checkpoint)
    model, expected = load(checkpoint, device=CUDA), logits_in_chunks(load(checkpoint), PROMPT, 90)
    for chunk in (90, 16, 1):
        torch.testing.assert_close(logits_in_chunks(model, PROMPT, chunk), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_forward_quantization_and_fp8_cache_on_gpu_are_finite(dtype, load_format, tmp_path):
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    options = {"quantization": "fp8", "kv_cache_dtype": "fp8", "load_format": load_format}
    model = load(checkpoint, device=CUDA, dtype=dtype, **options)
    assert model.cache_dtype == torch.float8_e4m3fn
    assert logits_in_chunks(model, PROMPT, 16).isfinite().all()


def test_quantize_fp8_on_gpu_equals_cpu_within_its_last_bit():
    """Devices may round a quotient in the middle of two numbers differently."""
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    on_gpu, on_cpu = quantize_fp8(weight.to(CUDA)), quantize_fp8(weight)
    torch.testing.assert_close(on_gpu.scales.cpu(), on_cpu.scales)
    found, expected = (quantized.dequantize(torch.float32).cpu() for quantized in (on_gpu, on_cpu))
    torch.testing.assert_close(found, expected, rtol=2**-3, atol=1e-6)
    assert (found == expected).float().mean() > 0.999
