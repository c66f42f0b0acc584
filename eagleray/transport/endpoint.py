"""Where a process of this host listens: a Unix socket in a directory that only this user may enter.

Nothing to probe and nothing to collide: the directory belongs to one instance, the file's name to one identity. The
directory's mode is the authentication.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

__all__ = ["local_address", "make_runtime_dir", "remove_runtime_dir"]

MAX_DIR_LENGTH = 70
"""A Unix socket's path has at most 107 bytes; this leaves room for the names of identities."""


def make_runtime_dir() -> Path:
    """A new directory, mode 0700, for the sockets of one instance."""
    parent = tempfile.gettempdir()
    if len(parent) > MAX_DIR_LENGTH - len("/eagleray-12345678"):
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="eagleray-", dir=parent))


def remove_runtime_dir(path: Path) -> None:
    """Remove the directory and every socket in it. Fine if it is gone already."""
    shutil.rmtree(path, ignore_errors=True)


def local_address(runtime_dir: Path, name: str) -> str:
    return f"ipc://{runtime_dir / name}"
