"""Memory of the cache that nobody has written to yet, asked for while there is nothing else to do.

On CPUs the system hands out memory in pages of 2 MiB when they are first written to, and a virtual machine takes
milliseconds for each: up to a fifth of a prompt. Blocks are used in the order of their numbers until all have been. So
when no step has run for a while, a thread asks for the pages of those that come next, some way ahead. A step that
begins meanwhile shares a core with one page at most.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eagleray.kernels.kv_cache import HUGE_PAGE_BYTES, KVCache
from eagleray.log import get_logger
from eagleray.messages.steps import StepPlan
from eagleray.worker.timeouts import QUIET_SECONDS, STOP_TIMEOUT_SECONDS

logger = get_logger(__name__)

AHEAD_BYTES = 2**30
"""Of all layers: a cache may be larger than what is ever used of it."""

POPULATE_WRITE = 23
"""Of Linux's madvise, since 5.14: get the pages as if each had been written to, and leave what is in them."""

Populate = Callable[[int, int], None]
"""From this address on so many bytes. Raises `OSError` if the system does not do that."""


class CachePrefaulter:
    """Of `cache`, if it is in a CPU's memory; else there is nothing to do.

    `populate` must not hold Python's lock.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        quiet_seconds: float = QUIET_SECONDS,
        ahead_bytes: int = AHEAD_BYTES,
        populate: Populate | None = None,
    ) -> None:
        self._layers = [layer for layer in cache.layers if layer.device.type == "cpu"]
        self._quiet_seconds = quiet_seconds
        self._populate = populate or _populate
        self._num_steps = 0
        self._is_running = False
        self._num_used = 0
        """Blocks: all behind them are fresh."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fresh-pages", daemon=True)
        if self._layers:
            first = self._layers[0]
            self._num_blocks, self._block_bytes = len(first), first[0].nbytes
            self._blocks_at_once = max(1, HUGE_PAGE_BYTES // self._block_bytes)
            self._ahead = ahead_bytes // (self._block_bytes * len(self._layers))
            self._thread.start()

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """While this step is carried out."""
        blocks = [block_ids for _, block_ids in plan.new_blocks] + [start.block_ids for start in plan.new_rows]
        self._num_used = max(self._num_used, *(1 + max(block_ids, default=-1) for block_ids in blocks), 0)
        self._num_steps += 1
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def close(self) -> None:
        """Harmless when repeated."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_SECONDS)

    def _run(self) -> None:
        steps, num_done = 0, 0
        try:
            while num_done < self._num_blocks and not self._closed.wait(self._quiet_seconds):
                was_quiet = steps == self._num_steps and not self._is_running
                steps = self._num_steps
                if was_quiet:
                    num_done = self._go_on(num_done, steps)
        except OSError as error:
            logger.debug("the system does not hand out memory in advance: %s", error)

    def _go_on(self, num_done: int, steps: int) -> int:
        """Behind the first `num_done` blocks, until it is enough or a step begins; how many are done then."""
        num_done = max(num_done, self._num_used // self._blocks_at_once * self._blocks_at_once)
        while num_done < min(self._num_used + self._ahead, self._num_blocks):
            count = min(self._blocks_at_once, self._num_blocks - num_done)
            for layer in self._layers:
                if self._closed.is_set() or steps != self._num_steps:
                    return num_done
                self._populate(layer.data_ptr() + num_done * self._block_bytes, count * self._block_bytes)
            num_done += count
        return num_done


def _populate(address: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + size - begin), POPULATE_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "madvise")
