"""The paged KV cache: one tensor of blocks for each layer. Allocated by the worker, written and read by attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Of a cache: the layers of the rank's stage, and the shape of a block in each."""

    num_layers: int
    block_size: int
    """Tokens."""
    block: tuple[int, ...]
    """As the kernels that write and read it want it, see `Kernels.cache_block`."""


LINE = 64
"""Bytes of a processor's cache line; kernels read whole ones."""

HUGE_PAGE = 2 * 2**20
"""In which the system hands out large memory, when a byte of it is first written to: that takes milliseconds."""


class KVCache:
    def __init__(self, layers: list[Tensor], block_size: int) -> None:
        self.layers = layers
        """Each [num_blocks, *block]."""
        self.block_size = block_size

    @classmethod
    def allocate(cls, shape: CacheShape, *, num_blocks: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """A cache of zeros. On a CPU, memory is taken only by blocks that are written to."""
        # Pages of different layers begin at different blocks: else one request in many would wait for a page of each.
        starts = [HUGE_PAGE * layer // shape.num_layers // LINE * LINE for layer in range(shape.num_layers)]
        return cls([_zeros((num_blocks, *shape.block), dtype, device, start) for start in starts], shape.block_size)

    @staticmethod
    def bytes_per_block(shape: CacheShape, dtype: torch.dtype) -> int:
        """Memory of one block over all layers."""
        return shape.num_layers * math.prod(shape.block) * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, start: int) -> Tensor:
    """Zeros, not whatever was there: attention multiplies what it masks by 0, which does not undo a NaN. `start`: so
    many bytes behind a huge page's boundary, on a CPU."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are pages that the system hands out when they are first written to; torch.zeros writes to all
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + HUGE_PAGE, dtype=np.uint8))
    offset = (start - memory.data_ptr()) % HUGE_PAGE
    return memory[offset : offset + size].view(dtype).view(shape)
