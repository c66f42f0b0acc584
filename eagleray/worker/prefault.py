"""Requests memory pages before they are first written: of the cache, while no step runs, and of new weights.

On CPUs the system provides memory in pages of 2 MiB when they are first written, and a virtual machine takes
milliseconds for each: up to a fifth of a prompt's time. Blocks are used in the order of their numbers until all have
been used. So a thread of low priority requests the pages of the first blocks as soon as the cache exists, and
those of the next blocks when no step has run for a while, up to a limit. A step that begins meanwhile competes for a
core with one page at most.

Updates prepare new weights in memory of their own. When a trainer connects, a thread of the lowest priority requests
its pages, because those of a whole model take a virtual machine seconds.

Owned by the serving worker.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from weakref import ReferenceType

from eagleray.kernels.cpu.huge_pages import WeightChunk
from eagleray.kernels.kv_cache import HUGE_PAGE_BYTES, KVCache
from eagleray.log import get_logger
from eagleray.worker.runner import Runner
from eagleray.worker.timeouts import QUIET_SECONDS, STOP_TIMEOUT_SECONDS

logger = get_logger(__name__)

AHEAD_BYTES = 2**30
"""Limit for the requested pages of all layers, because a cache may be larger than the part that is ever used."""

MADV_POPULATE_WRITE = 23
"""Advice for Linux's madvise, since 5.14: provide the pages as if each had been written, and keep their content."""

LOWEST_PRIORITY = 19
"""Nice value of a thread that runs when nothing else does."""

LOW_PRIORITY = 5
"""Nice value of a thread that lets the rest of the start go first, and is still scheduled soon: steps wait for it if it
loses its core while it has Python's lock."""

Populate = Callable[[int, int], None]
"""Requests the pages of (address, number of bytes). Must not hold the GIL. Raises `OSError` if the system refuses."""


class CachePrefaulter:
    """Requests pages of `cache`, if it is in a CPU's memory, between the steps of `runner`."""

    def __init__(
        self,
        cache: KVCache,
        runner: Runner,
        *,
        quiet_seconds: float = QUIET_SECONDS,
        ahead_bytes: int = AHEAD_BYTES,
        populate: Populate | None = None,
    ) -> None:
        self._layers = [layer for layer in cache.layers if layer.device.type == "cpu"]
        self._runner = runner
        self._quiet_seconds = quiet_seconds
        self._populate = populate or _populate
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)
        if self._layers:
            first = self._layers[0]
            self._num_blocks, self._block_bytes = len(first), first[0].nbytes
            self._blocks_at_once = max(1, HUGE_PAGE_BYTES // self._block_bytes)
            self._num_ahead = ahead_bytes // (self._block_bytes * len(self._layers))
            self._thread.start()

    def close(self) -> None:
        """Stop the thread; harmless when repeated."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_SECONDS)

    def _run(self) -> None:
        num_steps, num_done = 0, 0
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
            while num_done < self._num_blocks:
                was_quiet = num_steps == self._runner.num_steps and not self._runner.is_stepping
                num_steps = self._runner.num_steps
                if was_quiet:
                    num_done = self._populate_blocks(num_done, num_steps)
                if self._closed.wait(self._quiet_seconds):
                    return
        except OSError as error:
            logger.debug("cache pages are not requested in advance: the system refuses: %s", error)

    def _populate_blocks(self, num_done: int, num_steps: int) -> int:
        """Request the pages behind the first `num_done` blocks, until the limit is reached or a step after `num_steps`
        begins. Returns how many blocks are done."""
        num_used = self._runner.num_used_blocks
        num_done = max(num_done, num_used // self._blocks_at_once * self._blocks_at_once)
        while num_done < min(num_used + self._num_ahead, self._num_blocks):
            count = min(self._blocks_at_once, self._num_blocks - num_done)
            for layer in self._layers:
                if self._closed.is_set() or num_steps != self._runner.num_steps:
                    return num_done
                self._populate(layer.data_ptr() + num_done * self._block_bytes, count * self._block_bytes)
            num_done += count
        return num_done


def prefault_chunks(
    chunks: Sequence[ReferenceType[WeightChunk]],
    *,
    read_free: Callable[[], int],
    populate: Populate | None = None,
) -> threading.Thread:
    """Start a thread that requests the pages of chunks, and return it. It ends when a chunk is freed, or when
    `read_free` returns less than twice the bytes that remain: it takes half of the free memory at most."""
    request = populate or _populate
    sizes = [(reference, chunk.used) for reference in chunks if (chunk := reference()) is not None]

    def run() -> None:
        remaining = sum(size for _, size in sizes)
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
            for reference, size in sizes:
                if read_free() < 2 * remaining:
                    logger.info("%d bytes of new weights are not requested in advance: memory is short", remaining)
                    return
                if not all(_request_page(reference, offset, request) for offset in range(0, size, HUGE_PAGE_BYTES)):
                    return
                remaining -= size
        except OSError as error:
            logger.debug("pages of new weights are not requested in advance: the system refuses: %s", error)

    thread = threading.Thread(target=run, name="prefault-weights", daemon=True)
    thread.start()
    return thread


def _request_page(reference: ReferenceType[WeightChunk], offset: int, request: Populate) -> bool:
    """Request a huge page, unless the chunk was freed."""
    chunk = reference()
    if chunk is not None:
        request(chunk.address + offset, HUGE_PAGE_BYTES)
    return chunk is not None


def _populate(address: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + size - begin), MADV_POPULATE_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "madvise")
