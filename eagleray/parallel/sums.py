"""Sums over ranks whose bits are the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_in_order(parts: Sequence[Tensor], *, out: Tensor) -> None:
    """The sum of the ranks' parts, of which there are at least two. bfloat16 and float16 are added up in float32 and
    rounded once."""
    if len(parts) > 2 and out.dtype.is_floating_point and out.itemsize < 4:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
    else:  # of two, a sum in half precision is computed in float32 and rounded once as it is
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
