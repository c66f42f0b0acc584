"""Keys that are pressed in a terminal, without waiting for the end of a line."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def pressed_keys() -> Iterator[Callable[[float], str]]:
    """Return a function that waits for a key, for some seconds at most, and returns it, or "" if none was pressed.
    Without a terminal at the standard input none ever is."""
    if not sys.stdin.isatty():
        yield _wait
        return
    import termios  # not on Windows
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield lambda seconds: _read_key(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _read_key(descriptor: int, seconds: float) -> str:
    is_ready, _, _ = select.select([descriptor], [], [], seconds)
    return os.read(descriptor, 1).decode(errors="replace") if is_ready else ""
