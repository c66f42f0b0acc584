"""Keep made files between runs: made once, whoever comes first, and never taken for whole when they are not.

A file ends in the SHA-256 of what comes before: loading a library that was cut short can end the process. Whoever
makes one holds a lock that the system releases if he dies, and makes it in a directory aside, so that a file has its
name only when it is finished.
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
"""How long another process may take to make the file: longer than a compiler may run."""

POLL_SECONDS = 0.05

SEAL_BYTES = hashlib.sha256().digest_size


def kept(directory: Path, name: str, make: Callable[[Path], Path]) -> Path:
    """The file of that name in `directory`. If it is not there whole, it is what `make(scratch directory)` returns.

    Raises `OSError` if the directory cannot be used, `DeadlineExceeded` if another process does not get ready, and
    what `make` raises.
    """
    path = directory / name
    if _is_whole(path):
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / f"{name}.lock"):
        if _is_whole(path):  # who held the lock has made it
            return path
        for remains in directory.glob(f"making-{name}-*"):  # of somebody who was killed
            shutil.rmtree(remains, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"making-{name}-", dir=directory))
        try:
            made = make(scratch)
            _seal(made)
            made.replace(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


def private_directory() -> Path:
    """A directory among the temporary files that is this user's alone. Raises `OSError` if somebody else has taken it:
    what lies there is loaded into this process."""
    path = Path(tempfile.gettempdir(), f"eagleray-cache-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others can write there", str(path))
    return path


def _seal(path: Path) -> None:
    content = path.read_bytes()
    with path.open("ab") as file:
        file.write(hashlib.sha256(content).digest())


def _is_whole(path: Path) -> bool:
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
            time.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also for a fork that has inherited the file
