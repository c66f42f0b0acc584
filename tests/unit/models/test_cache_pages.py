"""Where the layers of a cache are in memory."""

from __future__ import annotations

import torch

from eagleray.kernels.kv_cache import CACHE_LINE_BYTES, HUGE_PAGE_BYTES, CacheShape, KVCache


def test_the_pages_of_its_layers_begin_at_different_blocks():
    shape = CacheShape(num_layers=4, block_size=16, block=(2, 16, 8))
    cache = KVCache.allocate(shape, num_blocks=10_000, dtype=torch.float32, device=torch.device("cpu"))
    places = [layer.data_ptr() % HUGE_PAGE_BYTES for layer in cache.layers]
    assert places == [HUGE_PAGE_BYTES * index // 4 for index in range(4)]
    assert all(place % CACHE_LINE_BYTES == 0 for place in places)
    assert [tuple(layer.shape) for layer in cache.layers] == [(10_000, 2, 16, 8)] * 4
    assert not any(layer.any() for layer in cache.layers)
