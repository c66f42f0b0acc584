"""A lock that processes of one host share through a file, so that a model is downloaded once."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagleray.errors import DeadlineExceeded
from eagleray.hub.disk_space import unwritable
from eagleray.log import get_logger

logger = get_logger(__name__)

POLL_INTERVAL_SECONDS = 0.1


@contextmanager
def file_lock(path: Path, *, timeout: float, purpose: str) -> Iterator[None]:
    """Hold the lock of a file within the block. The system releases it if the process exits.

    Raises `DeadlineExceeded` if another process holds it for longer than `timeout` seconds, and `CheckpointError` if
    the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open(path)
    except OSError as error:
        raise unwritable(purpose, path.parent, str(error.strerror)) from None
    try:
        _wait_for(descriptor, path, timeout, purpose)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def free_lock(path: Path, *, is_temporary: bool = False) -> Iterator[bool]:
    """Hold the lock of a file within the block if no other process has it. Yields whether it is held.

    `is_temporary`: whether the file is removed before its lock is released. Raises `OSError` if the file cannot be
    opened or locked.
    """
    descriptor = _open(path)
    try:
        # without a link, the file was removed by its last holder, and others lock a new one
        is_held = _try_lock(descriptor) and os.fstat(descriptor).st_nlink > 0
        try:
            yield is_held
        finally:
            if is_held and is_temporary:
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)


def _try_lock(descriptor: int) -> bool:
    """Lock an open file unless another process has locked it. Returns whether it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(descriptor: int, path: Path, timeout: float, purpose: str) -> None:
    deadline = time.monotonic() + timeout
    is_logged = False
    while True:
        try:
            if _try_lock(descriptor):
                return
        except OSError as error:  # some network file systems have no locks
            raise unwritable(purpose, path.parent, f"files cannot be locked there ({error.strerror})") from None
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(
                f"{purpose}: another process has held {path} for {timeout:.0f} s; it downloads the same model"
            )
        if not is_logged:
            logger.info("%s: waiting for another process that downloads it (lock %s)", purpose, path)
            is_logged = True
        time.sleep(POLL_INTERVAL_SECONDS)
