"""The memory of the KV cache."""

from __future__ import annotations

import torch

from eagleray.kernels.kv_cache import CACHE_LINE_BYTES, HUGE_PAGE_BYTES, CacheShape, KVCache

CPU = torch.device("cpu")
SHAPE = CacheShape(num_layers=3, block_size=16, block=(16, 4, 64))


def test_kv_cache_allocated_has_bytes_per_block():
    for dtype in (torch.bfloat16, torch.float32):
        cache = KVCache.allocate(SHAPE, num_blocks=5, dtype=dtype, device=CPU)
        assert len(cache.layers) == 3
        assert sum(layer.nbytes for layer in cache.layers) == 5 * KVCache.bytes_per_block(SHAPE, dtype)
        assert all(layer.dtype == dtype and not layer.any() for layer in cache.layers)


def test_kv_cache_unused_blocks_take_no_memory():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    cache = KVCache.allocate(SHAPE, num_blocks=40_000, dtype=torch.float32, device=CPU)
    assert sum(layer.nbytes for layer in cache.layers) > 1 << 30
    assert resident() - before < 64 << 20


def test_kv_cache_pages_of_layers_begin_at_different_blocks():
    shape = CacheShape(num_layers=4, block_size=16, block=(2, 16, 8))
    cache = KVCache.allocate(shape, num_blocks=10_000, dtype=torch.float32, device=CPU)
    offsets = [layer.data_ptr() % HUGE_PAGE_BYTES for layer in cache.layers]
    assert offsets == [HUGE_PAGE_BYTES * index // 4 for index in range(4)]
    assert all(offset % CACHE_LINE_BYTES == 0 for offset in offsets)
    assert [tuple(layer.shape) for layer in cache.layers] == [(10_000, 2, 16, 8)] * 4
    assert not any(layer.any() for layer in cache.layers)
