"""Limit of open files of this process, which its child processes inherit."""

from __future__ import annotations

import contextlib
import resource

ENOUGH_FILES = 2**16
"""Soft limit that suffices. Hard limits of a billion exist, and some programs walk through all numbers up to the soft
one."""

NO_LIMIT = 2**30


def open_files_limit() -> int:
    """Return the number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def raise_open_files_limit(needed: int = 0) -> int:
    """Raise the soft limit to `ENOUGH_FILES`, or to `needed` if that is more, as far as the hard limit allows, and
    return it.

    Only for this project's own programs: code that uses `select` cannot handle descriptors from 1024 on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(ENOUGH_FILES, needed)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):  # forbidden by something else than the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return open_files_limit()
