"""Memory that was freed and that the process keeps all the same."""

from __future__ import annotations

import contextlib
import ctypes


def malloc_trim() -> None:
    """Let the system have it.

    While weights are packed, tensors of about a megabyte come and go in several threads. glibc cuts aligned ones out of
    larger pieces, puts small objects into what is left of these, and then cannot use them for the next tensor: a
    model of many experts kept 1.2 times its own size in pieces that nobody used.
    """
    with contextlib.suppress(AttributeError):  # a C library that has no such function
        ctypes.CDLL(None).malloc_trim(0)
