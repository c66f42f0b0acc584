"""The return of memory to the system after large requests.

The memory of a request may be in reference cycles (a chat template's context, a task that failed), which only Python's
collector finds, and the collector seldom runs on a server that does little. glibc keeps the pieces of freed memory.
"""

from __future__ import annotations

import asyncio
import gc

from eagleray.process.malloc import malloc_trim
from eagleray.server.timeouts import MEMORY_RETURN_SECONDS


class MemoryReturn:
    """Owned by `Service`; belongs to the running event loop."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self) -> None:
        """Clean up after `MEMORY_RETURN_SECONDS`, unless a clean-up is scheduled already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MEMORY_RETURN_SECONDS, self._clean_up)

    def _clean_up(self) -> None:
        self._timer = None
        gc.collect()
        malloc_trim()
