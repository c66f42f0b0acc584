"""Random weights, for trying a model's shape without its weight files."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["DummyWeights"]

BLOCK = 1 << 20
"""Numbers that are really drawn; drawing billions would take minutes."""

STANDARD_DEVIATION = 0.05


class DummyWeights:
    """See `weights.Weights`. The same seed gives the same weights, on any device."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.num_parameters = 0
        block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed)) * STANDARD_DEVIATION
        self._block = block.to(device=device, dtype=dtype)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel()
        self.num_parameters += size
        if name.endswith("norm.weight"):
            return self._block.new_ones(shape)
        out = self._block.new_empty(size)
        start = zlib.crc32(name.encode()) % BLOCK  # so that no two layers are the same
        filled = 0
        while filled < size:
            part = self._block[start : start + size - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            start = 0
        return out.view(shape)

    def take_rows(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Tensor:
        return torch.cat([self.take(name, shape) for name, shape in zip(names, shapes, strict=True)])
