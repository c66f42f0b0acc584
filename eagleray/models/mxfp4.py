"""Four-bit weights of the OCP Microscaling Formats (MX) v1.0, section 5: blocks of 32 numbers E2M1 that share a scale
E8M0. Decoded when they are loaded."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 32
"""Numbers with one scale."""
BLOCK_BYTES = BLOCK_SIZE // 2

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign."""
SCALE_BIAS = 127


def decode(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks uint8 [rows, num_blocks, 16], two numbers in each byte and the first one in its lower half, and scales
    uint8 [rows, num_blocks] -> [rows, num_blocks * 32] of `dtype`."""
    kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # which have room for every scale
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=kind, device=blocks.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)  # [256, 2] of every byte
    words = pairs.view(torch.int32 if kind == torch.bfloat16 else torch.int64)[:, 0]  # a pair is looked up as one
    numbers = words.index_select(0, blocks.flatten().int()).view(kind).view(*scales.shape, BLOCK_SIZE)
    powers = torch.ldexp(torch.ones(scales.shape, device=blocks.device), scales.int() - SCALE_BIAS).to(kind)
    return numbers.mul_(powers[:, :, None]).to(dtype).flatten(1)
