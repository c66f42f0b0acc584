"""Memory of weights and caches on a CPU is returned to the system, and serves again afterwards."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagleray.kernels import memory_release
from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.kv_cache import CacheShape, KVCache
from eagleray.kernels.memory_release import ReleasablePages, releasable_memory, release_pages
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.onednn import OneDnnBackend

CPU = torch.device("cpu")
SIZE, NUM_LAYERS = 1024, 6
LEAST = 0.95
"""Least part of the memory that is to be returned."""
NOISE = 4 << 20
"""Bytes by which the memory of the process may grow meanwhile, by a huge page or two of something else."""

BACKENDS: dict[str, Callable[[], KernelBackend]] = {
    "torch": TorchBackend,
    "onednn": OneDnnBackend,
    "cpu": lambda: CpuBackend(native_library(), torch.float32, num_threads=1),
}


def resident_set() -> int:
    """Return the bytes of memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Stack:
    """Products and norms with small and large weights."""

    def __init__(self, backend: KernelBackend, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.operations = []
        for _ in range(NUM_LAYERS):
            weight = torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5
            self.operations.append(backend.linear(weight, torch.randn(SIZE, generator=generator)))
        self.operations.append(backend.linear(torch.randn(10, SIZE, generator=generator), None))
        gc.collect()

    @property
    def storage(self) -> list[Tensor]:
        return [part for operation in self.operations for part in operation.storage()]

    def run(self, x: Tensor) -> Tensor:
        for operation in self.operations:
            x = operation(x)
        return x.clone()


@pytest.mark.parametrize("name", BACKENDS)
def test_release_of_weights_returns_them_to_the_system_until_they_are_copied_back(name: str) -> None:
    backend = BACKENDS[name]()
    stack, other = Stack(backend, 1), Stack(backend, 2)
    x = torch.randn(3, SIZE)
    expected, others = stack.run(x), other.run(x)
    kept, addresses = [part.clone() for part in stack.storage], [part.data_ptr() for part in stack.storage]
    size, before = sum(part.nbytes for part in stack.storage), resident_set()

    memory = releasable_memory(stack.storage, CPU)
    assert memory.release(keeps=True) == 0
    assert before - resident_set() < NOISE
    freed = memory.release(keeps=False)
    assert before - resident_set() >= LEAST * size - NOISE and freed >= LEAST * size
    assert not any(part.any() for part in stack.storage)  # read, not written: such pages take no memory
    memory.restore()

    for target, part in zip(stack.storage, kept, strict=True):
        target.copy_(part)
    assert [part.data_ptr() for part in stack.storage] == addresses
    assert torch.equal(stack.run(x), expected)
    assert torch.equal(other.run(x), others)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_release_of_cache_returns_its_memory(num_layers: int) -> None:
    shape = CacheShape(num_layers=num_layers, block_size=16, block=(4096,))
    cache = KVCache.allocate(shape, num_blocks=1000, dtype=torch.float32, device=CPU)
    size = sum(layer.nbytes for layer in cache.layers)
    for layer in cache.layers:
        layer[: len(layer) // 2].fill_(3.0)  # a cache may be used in part
    before = resident_set()
    freed = ReleasablePages(cache.layers).release(keeps=False)
    assert 0.45 * size < freed <= size and before - resident_set() >= LEAST * freed - NOISE
    assert release_pages(cache.layers) == 0  # nothing is left
    assert not any(layer.any() for layer in cache.layers)
    cache.layers[0].fill_(2.0)
    assert bool((cache.layers[0] == 2.0).all())


PAGE = mmap.PAGESIZE
PIECES = st.lists(st.tuples(st.sampled_from([0, 1, 64, PAGE]), st.integers(0, 3 * PAGE)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(pieces=PIECES)
def test_release_pages_other_memory_keeps_its_contents(pieces: list[tuple[int, int]]) -> None:
    memory = torch.full((26 * PAGE,), 7, dtype=torch.uint8)
    expected, released, end = memory.clone(), [], 100
    for gap, size in pieces:
        start, end = end + gap, end + gap + size
        released.append(memory[start:end])
        expected[start:end] = 0
    release_pages([*reversed(released), *released[:1]])
    assert torch.equal(memory, expected)


def test_release_pages_in_a_shared_page_are_returned_together() -> None:
    memory = torch.ones(64 * PAGE, dtype=torch.uint8)
    parts = memory[: 64 * PAGE // 1000 * 1000].split(1000)
    assert release_pages(parts) >= 62 * PAGE
    assert not memory[: len(parts) * 1000].any()


def test_release_pages_locked_memory_raises() -> None:
    memory = torch.ones(64 * PAGE, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    if libc.mlock(*where) != 0:
        pytest.skip("the system allows no locked memory")
    try:
        with pytest.raises(OSError, match="madvise"):
            release_pages([memory])
    finally:
        libc.munlock(*where)


def test_release_pages_of_many_pages_counts_them_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_release, "MINCORE_PAGES", 3)
    memory = torch.ones(64 * PAGE, dtype=torch.uint8)
    assert 63 * PAGE <= release_pages([memory]) <= 64 * PAGE
