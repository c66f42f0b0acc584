"""The four-bit weights of the OCP Microscaling Formats (MX) v1.0, section 5: blocks of 32 numbers E2M1 that share a
scale E8M0. They are decoded for backends that do not keep this format; for the others, plain numbers are encoded."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from eagleray.kernels.quantized import MXFP4_BLOCK, MXFP4_SCALE_BIAS, MXFP4_VALUES

BLOCK_BYTES = MXFP4_BLOCK // 2
MAX_EXPONENT = 2
"""Exponent of the largest number E2M1, 6."""


def decode(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers as [rows, num_blocks * 32] of `dtype`. `blocks` is uint8 [rows, num_blocks, 16], with two
    numbers in each byte, the first one in its lower half; `scales` is uint8 [rows, num_blocks]."""
    kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # these can represent every scale
    values = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)], dtype=kind, device=blocks.device)
    pairs = torch.stack(
        (values.repeat(16), values.repeat_interleave(16)), dim=1
    )  # [256, 2] the two numbers of every byte
    words = pairs.view(torch.int32 if kind == torch.bfloat16 else torch.int64)[:, 0]  # one lookup finds a pair
    numbers = words.index_select(0, blocks.flatten().int()).view(kind).view(*scales.shape, MXFP4_BLOCK)
    powers = torch.ldexp(torch.ones(scales.shape, device=blocks.device), scales.int() - MXFP4_SCALE_BIAS).to(kind)
    return numbers.mul_(powers[:, :, None]).to(dtype).flatten(1)


def encode(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks and scales of numbers [rows, columns], as `decode` takes them. Each block has the scale of
    section 6.3, and its numbers are rounded to the nearest ones, half to even; numbers that `decode` returned are
    encoded without loss."""
    parts = numbers.float().unflatten(1, (-1, MXFP4_BLOCK))  # [rows, num_blocks, 32]
    _, exponents = torch.frexp(parts.abs().amax(dim=2))
    scales = (exponents - 1 - MAX_EXPONENT + MXFP4_SCALE_BIAS).clamp_(0, 2 * MXFP4_SCALE_BIAS)
    scaled = torch.ldexp(parts, MXFP4_SCALE_BIAS - scales[:, :, None])
    halfway = [(low + high) / 2 for low, high in pairwise(MXFP4_VALUES)]
    to_lower, to_upper = (torch.tensor(halfway[first::2], device=numbers.device) for first in (0, 1))
    sizes = scaled.abs().contiguous()
    codes = torch.bucketize(sizes, to_lower) + torch.bucketize(sizes, to_upper, right=True) + 8 * scaled.signbit()
    codes = codes.to(torch.uint8)
    return codes[:, :, 0::2] | codes[:, :, 1::2] << 4, scales.to(torch.uint8)
