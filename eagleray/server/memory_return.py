"""Memory that large requests have used, given back to the system when they are over.

What a request has used may be in cycles (a chat template's context, a task that failed), which only Python's collector
finds, and it comes by rarely on a server that does little. Of what is freed glibc keeps the pieces.
"""

from __future__ import annotations

import asyncio
import gc

from eagleray.process.malloc import malloc_trim
from eagleray.server.timeouts import MEMORY_RETURN_SECONDS


class MemoryReturn:
    """Lives in the running event loop."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self) -> None:
        """Clean up in a moment, unless that is about to happen already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MEMORY_RETURN_SECONDS, self._clean_up)

    def _clean_up(self) -> None:
        self._timer = None
        gc.collect()
        malloc_trim()
