"""The four-bit weights of the OCP Microscaling Formats (MX) v1.0, section 5: blocks of 32 numbers E2M1 that share a
scale E8M0, decoded for backends that do not keep them."""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.kernels.quantized import MXFP4_BLOCK, MXFP4_SCALE_BIAS, MXFP4_VALUES

BLOCK_BYTES = MXFP4_BLOCK // 2


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
