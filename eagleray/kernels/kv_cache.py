"""The paged KV cache: one tensor of blocks for each layer.

Allocated by the worker, written and read by attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The shape of a cache apart from its number of blocks."""

    num_layers: int
    """Layers of the rank's pipeline stage."""
    block_size: int
    """Tokens."""
    block: tuple[int, ...]
    """Shape of a block in one layer, see `KernelBackend.cache_block`."""


CACHE_LINE_BYTES = 64

HUGE_PAGE_BYTES = 2 * 2**20
"""Unit in which the system provides large memory, at the first write to any byte of it. That takes milliseconds."""


class KVCache:
    def __init__(self, layers: list[Tensor], block_size: int) -> None:
        self.layers = layers
        """Tensors [num_blocks, *block], one for each layer."""
        self.block_size = block_size

    @classmethod
    def allocate(cls, shape: CacheShape, *, num_blocks: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """Allocate a cache of zeros. On a CPU only blocks that are written to occupy memory."""
        # Pages of different layers begin at different blocks; else one request in many would wait for a page of every
        # layer at once.
        lines = HUGE_PAGE_BYTES // CACHE_LINE_BYTES
        offsets = [lines * layer // shape.num_layers * CACHE_LINE_BYTES for layer in range(shape.num_layers)]
        blocks = num_blocks, *shape.block
        if device.type != "cpu":
            return cls([torch.zeros(blocks, dtype=dtype, device=device) for _ in offsets], shape.block_size)
        return cls([host_zeros(blocks, dtype, offset) for offset in offsets], shape.block_size)

    @staticmethod
    def bytes_per_block(shape: CacheShape, dtype: torch.dtype) -> int:
        """Return the memory of one block over all layers."""
        return shape.num_layers * math.prod(shape.block) * dtype.itemsize


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, page_offset: int = 0) -> Tensor:
    """Return zeros in a CPU's memory, from `page_offset` bytes after a huge page's boundary. They take memory when they
    are first written to, in huge pages if they are large.

    Uninitialized memory would not do: attention multiplies masked values by 0, and 0 x NaN is NaN.
    """
    # numpy's zeros are pages that the system provides at the first write; torch.zeros writes to all of them
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + HUGE_PAGE_BYTES, dtype=np.uint8))
    start = (page_offset - memory.data_ptr()) % HUGE_PAGE_BYTES
    return memory[start : start + size].view(dtype).view(shape)
