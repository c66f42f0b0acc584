"""Exits of a process that are not Python's usual one."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from eagleray.log import get_logger

logger = get_logger(__name__)


def exit_disconnected(seconds: float) -> None:
    """Exit a worker whose engine sends no heartbeats: the engine treats the worker as lost by now, and must not find
    it running."""
    logger.error("the engine was silent for %.0f s: exiting", seconds)
    os._exit(1)


def exit_broken_device() -> None:
    """Exit a worker that has reported a failure on its GPU: to leave groups and free memory there might wait forever,
    and the system does it when the process ends."""
    logger.error("exiting at once, since the GPU may not answer after a failure")
    os._exit(1)


def exit_without_teardown(code: int) -> NoReturn:
    """Exit as Python does, with waits for threads, exit handlers and flushed streams, except that no module is cleared:
    that takes a process with torch 0.2 to 0.6 s of a core, and the system frees its memory anyway. Processes of
    `multiprocessing` exit in this way too."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # it was replaced, closed, or nobody reads it any more
            stream.flush()
    os._exit(code)
