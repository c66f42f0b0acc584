"""Random weights in every format that products take."""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.kernels.cuda.triton.tile_product import pad_scales
from eagleray.kernels.quantized import Fp8Weight, Mxfp4Weight, Weight

FORMATS = ("plain", "fp8", "fp8 rows", "mxfp4")


def random_weight(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
    """Return a weight [num_slots, rows, columns] of about unit size. Neighbouring memory is NaN, or the largest
    number there is."""
    *leading, rows, columns = shape
    if kind == "plain":
        return _surrounded(torch.randn(shape).to(dtype), torch.nan)
    if kind == "mxfp4":
        blocks = torch.randint(256, (*leading, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(124, 128, (*leading, rows, columns // 32), dtype=torch.uint8)
        padded = pad_scales(scales)
        whole = padded.as_strided((*leading, rows, padded.stride(-2)), padded.stride())
        whole[..., columns // 32 :] = 255
        return Mxfp4Weight(_surrounded(blocks, 255), padded)
    block = (128, 128) if kind == "fp8" else (1, columns)
    values = (torch.randn(shape) * 50).to(torch.float8_e4m3fn)
    values.view(-1)[:256] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[: values.numel()]
    values = values.float().nan_to_num(1.0).to(torch.float8_e4m3fn)
    scales = torch.rand(*leading, -(-rows // block[0]), -(-columns // block[1])) / 50
    return Fp8Weight(_surrounded(values.view(torch.uint8), 0x7F).view(torch.float8_e4m3fn), scales, block)


def dequantized(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the numbers, rounded to `dtype`, as float64."""
    return (weight if isinstance(weight, Tensor) else weight.dequantize(dtype)).double()


def _surrounded(values: Tensor, poison: float) -> Tensor:
    memory = torch.full((values.numel() + 512,), poison, dtype=values.dtype)
    memory[256:-256] = values.flatten()
    return memory[256:-256].view(values.shape)
