"""Progress of a download over all its files: a bar on a terminal, otherwise a line of the log now and then."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

from eagleray.errors import DeadlineExceeded
from eagleray.hub.disk_space import format_size
from eagleray.log import get_logger, has_bars, open_bar

logger = get_logger(__name__)

LOG_INTERVAL_SECONDS = 30.0


class DownloadCancelled(Exception):
    """Raised in the thread of a file, because another file failed or the user gave up."""


class DownloadProgress:
    """Counts bytes from several threads. After `cancel` the next count in each thread raises `DownloadCancelled`."""

    def __init__(self, name: str, total: int | None) -> None:
        self._name = name
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._started = self._logged = self._changed = time.monotonic()
        self._bar = open_bar(
            desc=f"downloading {name}",
            total=total,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            is_shown=has_bars(),
        )

    def __enter__(self) -> DownloadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if kind is None:
            seconds = time.monotonic() - self._started
            logger.info("downloaded %s: %s in %.1f s", self._name, format_size(self._done), seconds)

    def check_idle(self, timeout: float) -> None:
        """Warn if nothing has arrived for a while. Raises `DeadlineExceeded` after `timeout` seconds."""
        seconds = time.monotonic() - self._changed
        message = f"downloading {self._name}: nothing has arrived for {seconds:.0f} s"
        cause = "another program may hold the lock of one of its files, below .locks in the cache"
        if seconds >= timeout:
            raise DeadlineExceeded(f"{message}: {cause}; end that program, and start again")
        if seconds >= LOG_INTERVAL_SECONDS:
            logger.warning("%s: %s, or the hub is slow", message, cause)

    def cancel(self) -> None:
        self._is_cancelled = True

    def add(self, num_bytes: int) -> None:
        if self._is_cancelled:
            raise DownloadCancelled
        with self._lock:
            self._done += num_bytes
            self._changed = now = time.monotonic()
            self._bar.update(num_bytes)
            if self._bar.disable and now - self._logged > LOG_INTERVAL_SECONDS:
                self._logged = now
                total = "" if self._total is None else f" of {format_size(self._total)}"
                logger.info("downloading %s: %s%s", self._name, format_size(self._done), total)

    def file_class(self) -> type:
        """Return a class that stands for the bar of one file, as huggingface_hub makes it, and counts here."""
        progress = self

        class FileProgress:
            def __init__(self, *args: Any, initial: int = 0, **options: Any) -> None:
                progress.add(initial)

            def __enter__(self) -> FileProgress:
                return self

            def __exit__(self, *details: object) -> None:
                pass

            def update(self, num_bytes: float | None = 1) -> None:
                progress.add(int(num_bytes or 0))

            def update_transfer(self, num_bytes: float | None = 1) -> None:
                """Do nothing: these bytes, of another transfer protocol, are counted when they reach the file."""

            def __getattr__(self, name: str) -> Any:
                if name.startswith("_") or name in ("total", "n"):
                    raise AttributeError(name)
                return _do_nothing  # close, refresh, descriptions

        return FileProgress


def _do_nothing(*args: object, **options: object) -> None:
    pass
