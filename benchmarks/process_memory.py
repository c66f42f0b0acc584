"""Peak of a process tree's own memory: anonymous pages, neither files nor shared memory."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

SAMPLE_INTERVAL_SECONDS = 0.05


class PeakMemory:
    """Context that samples a process and all its descendants; `peak_bytes` is their largest sum."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_SECONDS):
            self.peak_bytes = max(self.peak_bytes, sum(map(anonymous_bytes, tree(self._pid))))


def tree(pid: int) -> list[int]:
    """Return the process and its descendants, including children of threads."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += [int(child) for child in children.read_text().split()]
    return found


def anonymous_bytes(pid: int) -> int:
    """Return the size of the process's anonymous pages; 0 if it has exited."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])
    return 0
