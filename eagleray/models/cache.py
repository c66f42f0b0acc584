"""The paged KV cache: one tensor of blocks for each layer. Allocated by the worker, written and read by attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["CacheShape", "KVCache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a cache holds of each token: this rank's key heads, in the layers of its stage."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class KVCache:
    """Keys and values of a token lie side by side, so that one copy writes both and one gather reads both."""

    def __init__(self, layers: list[Tensor], block_size: int) -> None:
        self.layers = layers
        """Each [num_blocks, block_size, 2 * num_kv_heads, head_dim]: keys of all heads, then values of all heads."""
        self.block_size = block_size

    @classmethod
    def allocate(
        cls, shape: CacheShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """A cache of zeros. On a CPU, memory is taken only by blocks that are written to."""
        layer = (num_blocks, block_size, 2 * shape.num_kv_heads, shape.head_dim)
        return cls([_zeros(layer, dtype, device) for _ in range(shape.num_layers)], block_size)

    @staticmethod
    def bytes_per_block(shape: CacheShape, block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block over all layers."""
        return shape.num_layers * block_size * 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not whatever was there: attention multiplies what it masks by 0, which does not undo a NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are pages that the system hands out when they are first written to; torch.zeros writes to all
    return (
        torch.from_numpy(np.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
    )
