"""Command lines of the processes that this one starts, and the signals that are blocked while they start."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence

from eagleray.process.fork_protocol import LABEL
from eagleray.process.spawn_protocol import GROUP_SIGNALS

ROOM_FOR_WORDS = 256
"""Bytes of a fork server's command line that the labels of its forks may use."""


def child_words(descriptor: int, label: str) -> list[str]:
    """Return the command line of a child whose end of the socket pair is `descriptor`."""
    return [sys.executable, "-P", "-c", _program("main"), str(descriptor), label]


def fork_server_words(descriptor: int, modules: Sequence[str]) -> list[str]:
    """Return the command line of a fork server, with room for those of its forks."""
    program, label = _program("fork_server_main"), LABEL.ljust(ROOM_FOR_WORDS)
    return [sys.executable, "-P", "-c", program, str(descriptor), ",".join(modules), label]


@contextlib.contextmanager
def group_signals_blocked() -> Iterator[None]:
    """Block the signals of the process group in this thread. A child inherits that until it ignores them itself, so
    Ctrl-C cannot end it while it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _program(function: str) -> str:
    """Return a program that calls a function of `child` and imports from the same paths as this process. `-m` would put
    the current directory first."""
    paths, imported = f"sys.path[:] = {sys.path!r}", f"from eagleray.process.child import {function}"
    return f"import sys; {paths}; {imported}; {function}()"
