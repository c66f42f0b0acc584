"""Return of freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes


def malloc_trim() -> None:
    """Have glibc return freed memory to the system.

    While weights are packed, tensors of about a megabyte come and go in several threads. glibc cuts aligned ones out of
    larger pieces, puts small objects into the rest of these, and then cannot use them for the next tensor: a model of
    many experts kept 1.2 times its own size in unused pieces.
    """
    with contextlib.suppress(AttributeError):  # a C library that has no such function
        ctypes.CDLL(None).malloc_trim(0)
