"""The limit of open files of this process, which the processes that it starts inherit."""

from __future__ import annotations

import contextlib
import resource

ENOUGH_FILES = 2**16
"""Hard limits of a billion exist, and programs that walk through all numbers up to the soft one."""

NO_LIMIT = 2**30


def open_files_limit() -> int:
    """Files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def raise_open_files_limit(needed: int = 0) -> int:
    """Raise the soft limit as far as the hard one allows, but not without end; to `needed` in any case. Return it.

    For programs of our own only: code that uses `select` cannot handle descriptors from 1024 on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(ENOUGH_FILES, needed)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):  # forbidden by something else than the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return open_files_limit()
