"""Keys that are pressed in a terminal, without waiting for the end of a line."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator

CTRL_C = "\x03"


@contextlib.contextmanager
def pressed_keys() -> Iterator[Callable[[float], str]]:
    """Return a function that waits for a key, for some seconds at most, and returns it, or "" if none was pressed.

    Without a terminal at the standard input there are none but Ctrl-C, which is a signal: it is noted and returned as a
    key, also if the program was started with the signal ignored, as a shell starts programs in the background.
    """
    signals: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    try:
        with _single_keys() as read_key:
            yield lambda seconds: CTRL_C if signals else read_key(seconds)
    finally:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
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
