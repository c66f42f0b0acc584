"""Cache pages are resident before a step needs them, and none are requested while a step runs."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from contextlib import contextmanager
from weakref import ref

import pytest
import torch

from eagleray.kernels.cpu.huge_pages import WeightChunk
from eagleray.kernels.kv_cache import HUGE_PAGE_BYTES, CacheShape, KVCache
from eagleray.worker.prefault import CachePrefaulter, _populate, prefault_chunks

BLOCK_BYTES = HUGE_PAGE_BYTES // 4
QUIET = 0.02
SECONDS = 20.0


def cache(num_blocks, num_layers=2):
    shape = CacheShape(num_layers=num_layers, block_size=16, block=(BLOCK_BYTES // 4,))
    return KVCache.allocate(shape, num_blocks=num_blocks, dtype=torch.float32, device=torch.device("cpu"))


class FakeRunner:
    """The attributes of a runner that describe its activity."""

    def __init__(self, num_used_blocks=0):
        self.num_steps = 0
        self.is_stepping = False
        self.num_used_blocks = num_used_blocks

    @contextmanager
    def step(self, *block_ids):
        """Run a step that uses these blocks."""
        self.num_used_blocks = max(self.num_used_blocks, 1 + max(block_ids))
        self.num_steps += 1
        self.is_stepping = True
        yield
        self.is_stepping = False


class RequestedPages:
    """Records the requested pages: (layer, first block, number of blocks)."""

    def __init__(self, of):
        self._of = of
        self.pieces = []

    def __call__(self, address, size):
        (layer,) = (n for n, x in enumerate(self._of.layers) if x.data_ptr() <= address < x.data_ptr() + x.nbytes)
        first, rest = divmod(address - self._of.layers[layer].data_ptr(), BLOCK_BYTES)
        assert rest == 0
        self.pieces.append((layer, first, size // BLOCK_BYTES))

    def until(self, num_pieces):
        deadline = time.monotonic() + SECONDS
        while len(self.pieces) < num_pieces:
            assert time.monotonic() < deadline, f"{self.pieces} after {SECONDS} s"
            time.sleep(0.005)
        time.sleep(5 * QUIET)  # more would come in this time
        return self.pieces


@pytest.fixture
def opened():
    made = []

    def open_pages(of, runner=None, *, quiet_seconds=QUIET, **options):
        runner = runner or FakeRunner()
        made.append(CachePrefaulter(of, runner, quiet_seconds=quiet_seconds, **options))
        return runner

    yield open_pages
    for pages in made:
        pages.close()
        pages.close()
    assert not any(thread.name == "prefault" for thread in threading.enumerate())


def test_prefaulter_quiet_requests_limited_pages_layer_by_layer(opened):
    of = cache(40)
    requested = RequestedPages(of)
    runner = opened(of, ahead_bytes=2 * 8 * BLOCK_BYTES, populate=requested)
    assert requested.until(4) == [(0, 0, 4), (1, 0, 4), (0, 4, 4), (1, 4, 4)]
    with runner.step(3, 9):
        pass
    assert requested.until(8)[4:] == [(0, 8, 4), (1, 8, 4), (0, 12, 4), (1, 12, 4), (0, 16, 4), (1, 16, 4)]


def test_prefaulter_new_cache_requests_pages_at_once(opened):
    of = cache(8)
    requested = RequestedPages(of)
    opened(of, quiet_seconds=2 * SECONDS, populate=requested)
    assert len(requested.until(4)) == 4


def test_prefaulter_used_blocks_are_skipped_and_cache_end_stops(opened):
    of = cache(22, num_layers=1)
    requested = RequestedPages(of)
    opened(of, FakeRunner(num_used_blocks=15), populate=requested)
    assert requested.until(3) == [(0, 12, 4), (0, 16, 4), (0, 20, 2)]


def test_prefaulter_running_step_requests_nothing(opened):
    of = cache(8)
    requested = RequestedPages(of)
    runner = FakeRunner()
    with runner.step(0):
        opened(of, runner, populate=requested)
        time.sleep(10 * QUIET)
        assert requested.pieces == []
    assert len(requested.until(4)) == 4


def test_prefaulter_new_step_interrupts_requests(opened):
    of, began, let_go = cache(40), threading.Event(), threading.Event()
    requested = RequestedPages(of)

    def populate(address, size):
        requested(address, size)
        began.set()
        assert let_go.wait(SECONDS)

    runner = opened(of, populate=populate)
    assert began.wait(SECONDS)
    with runner.step(0):
        let_go.set()
        time.sleep(5 * QUIET)
        assert len(requested.pieces) == 1
    assert len(requested.until(20)) == 21  # the first piece is requested for again


def test_prefaulter_system_refuses_stops(opened):
    calls = []

    def refuse(address, size):
        calls.append(address)
        raise OSError(22, "madvise")

    opened(cache(8), populate=refuse)
    time.sleep(10 * QUIET)
    assert len(calls) == 1


def test_prefaulter_pages_are_resident_and_keep_content():
    num_blocks = 20
    memory = mmap.mmap(-1, num_blocks * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    layer = torch.frombuffer(memory, dtype=torch.float32).view(num_blocks, BLOCK_BYTES // 4)
    try:
        _populate(layer.data_ptr(), mmap.PAGESIZE)
    except OSError as error:
        pytest.skip(f"the system does not hand out memory in advance: {error}")
    layer[0].fill_(3.0)
    assert _resident_share(layer) < 0.5
    CachePrefaulter(KVCache([layer], block_size=16), FakeRunner(), quiet_seconds=QUIET)._thread.join(SECONDS)
    assert _resident_share(layer) == 1.0
    assert bool((layer[0] == 3.0).all()) and not layer[1:].any()


def _resident_share(layer):
    num_pages = layer.nbytes // mmap.PAGESIZE
    pages = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(layer.data_ptr()), ctypes.c_size_t(layer.nbytes), pages) == 0
    return sum(page & 1 for page in pages) / num_pages


# ---- new weights


def chunks_of(*sizes):
    made = [WeightChunk.allocate(size) for size in sizes]
    chunks = [WeightChunk.of(memory) for memory in made]
    for chunk in chunks:
        chunk.used = chunk.num_bytes
    return made, [ref(chunk) for chunk in chunks]


def prefaulted(chunks, *, free, populate):
    thread = prefault_chunks(chunks, read_free=lambda: free, populate=populate)
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_prefault_chunks_requests_every_page_of_each():
    memory, chunks = chunks_of(2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
    pages = []
    prefaulted(chunks, free=6 * HUGE_PAGE_BYTES, populate=lambda *page: pages.append(page))
    begins = [memory[0].data_ptr(), memory[0].data_ptr() + HUGE_PAGE_BYTES, memory[1].data_ptr()]
    assert pages == [(begin, HUGE_PAGE_BYTES) for begin in begins]


def test_prefault_chunks_less_than_half_of_memory_free_requests_none():
    _memory, chunks = chunks_of(2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
    pages = []
    prefaulted(chunks, free=6 * HUGE_PAGE_BYTES - 1, populate=lambda *page: pages.append(page))
    assert pages == []


def test_prefault_chunks_freed_chunk_stops():
    memory, chunks = chunks_of(2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
    pages = []

    def populate(*page):
        pages.append(page)
        del memory[:]

    prefaulted(chunks, free=6 * HUGE_PAGE_BYTES, populate=populate)
    assert len(pages) == 1


def test_prefault_chunks_system_makes_pages_resident():
    memory, chunks = chunks_of(2 * HUGE_PAGE_BYTES)
    prefaulted(chunks, free=2**40, populate=None)
    resident = (ctypes.c_uint8 * (len(memory[0]) // mmap.PAGESIZE))()
    address = ctypes.c_void_p(memory[0].data_ptr())
    assert ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(len(memory[0])), resident) == 0
    assert all(page & 1 for page in resident)
