"""Adoption of orphans: for a moment, the kernel gives this process the descendants whose parent exits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37

_lock = threading.Lock()  # the setting is that of the process, which may have several fork servers


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopt orphans within the block. Raises `OSError` where the kernel cannot."""
    library = ctypes.CDLL(None, use_errno=True)

    def prctl(option: int, argument: object) -> None:
        if library.prctl(option, argument):
            raise OSError(ctypes.get_errno(), "prctl")

    with _lock:
        before = ctypes.c_int()
        prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
        prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
        try:
            yield
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(before.value))
