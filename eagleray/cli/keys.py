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

    SIGINT, which a terminal sends for Ctrl-C, and SIGTERM are returned as Ctrl-C, so that the caller can restore the
    terminal; also if the program was started with SIGINT ignored, as a shell starts programs in the background. If
    standard input is no terminal, there are no other keys.
    """
    signals: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, lambda number, frame: signals.append(number)) for number in numbers]
    try:
        with _single_keys() as read_key:
            yield lambda seconds: CTRL_C if signals else read_key(seconds)
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


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
