"""The memory of the KV cache."""

from __future__ import annotations

import torch

from eagleray.kernels.kv_cache import CacheShape, KVCache

SHAPE = CacheShape(num_layers=3, block_size=16, block=(16, 4, 64))


def test_its_size_is_what_bytes_per_block_says():
    for dtype in (torch.bfloat16, torch.float32):
        cache = KVCache.allocate(SHAPE, num_blocks=5, dtype=dtype, device=torch.device("cpu"))
        assert len(cache.layers) == 3
        assert sum(layer.nbytes for layer in cache.layers) == 5 * KVCache.bytes_per_block(SHAPE, dtype)
        assert all(layer.dtype == dtype and not layer.any() for layer in cache.layers)


def test_a_large_cache_takes_memory_only_when_it_is_used():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    cache = KVCache.allocate(SHAPE, num_blocks=40_000, dtype=torch.float32, device=torch.device("cpu"))
    assert sum(layer.nbytes for layer in cache.layers) > 1 << 30
    assert resident() - before < 64 << 20
