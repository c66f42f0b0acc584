"""A cache of files that survives the process. Each file is made once, by the first process that needs it.

A file ends with the SHA-256 of the rest, because loading a truncated library can crash the process. A process makes a
file under a lock, which the system releases if the process dies, and in a scratch directory, so that a file has its
final name only when it is complete.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eagleray.errors import DeadlineExceeded

LOCK_SECONDS = 300.0
"""Longest wait for another process that makes the file; longer than a compiler may run."""

POLL_INTERVAL_SECONDS = 0.05

SEAL_BYTES = hashlib.sha256().digest_size


def cached_file(directory: Path, name: str, make: Callable[[Path], Path]) -> Path:
    """Return the path of a file in `directory`. If it is missing or damaged, it becomes the file that `make(scratch
    directory)` returns.

    Raises `OSError` if the directory cannot be used, `DeadlineExceeded` if another process takes too long to make the
    file, and every exception of `make`.
    """
    path = directory / name
    if is_whole(path):
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / f"{name}.lock"):
        if is_whole(path):  # the previous holder of the lock has made it
            return path
        for remains in directory.glob(f"making-{name}-*"):  # left by a process that was killed
            shutil.rmtree(remains, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"making-{name}-", dir=directory))
        try:
            made = make(scratch)
            seal(made)
            made.replace(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


def private_directory() -> Path:
    """Return a directory among the temporary files that only this user can write to. Raises `OSError` if another user
    owns or can write to it, because its files are loaded into this process."""
    path = Path(tempfile.gettempdir(), f"eagleray-cache-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others can write there", str(path))
    return path


def seal(path: Path) -> None:
    """Append the SHA-256 of a file, by which `is_whole` tells whether it is damaged."""
    content = path.read_bytes()
    with path.open("ab") as file:
        file.write(hashlib.sha256(content).digest())


def is_whole(path: Path) -> bool:
    """Return whether a file exists and is as it was sealed. Raises `OSError` if it cannot be read."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-SEAL_BYTES]).digest() == content[-SEAL_BYTES:]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_SECONDS
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"another process has held {path} for more than {LOCK_SECONDS:.0f} s")
            time.sleep(POLL_INTERVAL_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # explicitly, because a forked child may have inherited the open file
