"""Runtime directories, which hold the Unix sockets of one instance and which only this user may enter.

There is nothing to probe and nothing to collide: the directory belongs to one instance, the file's name to one
identity. The directory's mode is the authentication.

The process that has made a directory holds a lock on it (`flock`, on the directory itself) for as long as it lives. The
system drops the lock when its holder exits, however it exits, so that whoever makes the next directory can tell what
was left behind, and removes it. Programs that the holder starts do not inherit the lock: children that outlive it and
still clean up do so without it, and do not keep others from doing the same.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import shutil
import socket as sockets
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq

from eagleray.errors import ConfigError
from eagleray.transport.timeouts import EMPTY_DIR_SECONDS, UNLOCKED_DIR_SECONDS

PREFIX = "eagleray-"
SUFFIX = ".run"
LOCKED_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}\{SUFFIX}")
UNLOCKED_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")
"""Names of directories of versions that did not lock: their use cannot be detected, unless they are empty."""

MAX_DIR_LENGTH = 70
"""Limit that leaves room for the names of identities: a Unix socket's path has at most 107 bytes."""


_locks: dict[Path, int] = {}
"""Directories of this process, and the descriptors that hold their locks."""


def make_runtime_dir(parent: str | None = None, *, max_length: int = MAX_DIR_LENGTH) -> Path:
    """Make a directory, mode 0700, for the sockets of one instance. Removes directories whose owners have exited.

    It is made in `parent`, or else where temporary files go, unless its path would be longer than `max_length`. Raises
    `ConfigError` if there is no directory for temporary files in which that is possible.
    """
    if parent is None:
        try:
            parent = tempfile.gettempdir()
        except OSError as error:  # `tempfile` has tried to write a file into each directory
            raise _no_temporary_directory(error) from error
    if len(parent) > max_length - len(f"/{PREFIX}12345678{SUFFIX}"):
        parent = "/tmp"
    _sweep(parent)
    while True:
        try:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, suffix=SUFFIX, dir=parent))
            lock = _lock(path)
        except OSError as error:
            raise no_room(parent, error) from error
        if lock is not None:
            _locks[path] = lock
            return path


def remove_runtime_dir(path: Path) -> None:
    """Remove the directory and every socket in it. A missing directory is ignored."""
    shutil.rmtree(path, ignore_errors=True)
    if (lock := _locks.pop(path, None)) is not None:
        os.close(lock)


def remove_dead_sockets(path: Path) -> None:
    """Remove the sockets of the directory without a listener, which killed processes have left."""
    for socket in path.iterdir():
        with contextlib.suppress(OSError):  # removed meanwhile
            state = socket.stat()
            # A new socket exists for a moment before its owner listens.
            is_new = time.time() - state.st_mtime < UNLOCKED_DIR_SECONDS
            if stat.S_ISSOCK(state.st_mode) and not is_new and not is_listening(socket):
                socket.unlink()


def is_listening(path: Path) -> bool:
    """Whether a process listens at the Unix socket. An idle connection does it no harm."""
    with contextlib.suppress(OSError), sockets.socket(sockets.AF_UNIX) as probe:
        probe.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # its backlog is full
            probe.connect(str(path))
        return True
    return False


def check_room(path: Path, num_bytes: int) -> None:
    """Raise `ConfigError` unless a file of `num_bytes` can be written in the directory."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        raise no_room(path, error) from error


def no_room(path: str | Path, error: OSError) -> ConfigError:
    """Return the error to raise when files or sockets cannot be made in the directory."""
    if error.errno == errno.EFBIG:
        return ConfigError(
            f"cannot write to the directory {str(path)!r}: this process may not write files of the size that is needed "
            f"(`ulimit -f` says {_file_size_limit()}): raise that limit"
        )
    return ConfigError(
        f"cannot write to the directory {str(path)!r}: {error.strerror or error}; make room there, or let this "
        "user write, or set the environment variable TMPDIR to another directory"
    )


def _no_temporary_directory(error: OSError) -> ConfigError:
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        hint = f"; files may have no more than {_file_size_limit()} here (`ulimit -f`): raise that limit if it is small"
    else:
        hint = ""
    return ConfigError(
        f"there is no directory for temporary files: {error.strerror or error}; set the environment variable TMPDIR to "
        f"a directory with free space in which this user may write{hint}"
    )


def _file_size_limit() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"


def local_address(runtime_dir: Path, name: str) -> str:
    return f"ipc://{runtime_dir / name}"


def bind_local(socket: zmq.Socket[Any], runtime_dir: Path, name: str) -> str:
    """Bind the socket in the directory and return its address. Raises `ConfigError` if there is no room for it."""
    address = local_address(runtime_dir, name)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise no_room(runtime_dir, OSError(error.errno, os.strerror(error.errno or 0))) from error
    return address


def _lock(path: str | Path) -> int | None:
    """Lock the directory. Returns the descriptor that holds the lock, or None if another process has it or has removed
    the directory."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(descriptor), os.lstat(path))
        except (BlockingIOError, FileNotFoundError):
            return None
        if is_there:
            stack.pop_all()
        return descriptor if is_there else None


def _sweep(parent: str) -> None:
    """Remove directories of this user whose owners have exited. Other processes may do the same at the same time: each
    directory is removed by the one that has got its lock."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):  # gone meanwhile
                    _remove_if_abandoned(entry)


def _remove_if_abandoned(entry: os.DirEntry[str]) -> None:
    state = entry.stat(follow_symlinks=False)
    if state.st_uid != os.geteuid() or not entry.is_dir(follow_symlinks=False):
        return
    age = time.time() - state.st_mtime
    if UNLOCKED_NAME.fullmatch(entry.name) and age > EMPTY_DIR_SECONDS:
        os.rmdir(entry.path)  # fails unless it is empty
    elif LOCKED_NAME.fullmatch(entry.name) and age > UNLOCKED_DIR_SECONDS and (lock := _lock(entry.path)) is not None:
        shutil.rmtree(entry.path, ignore_errors=True)
        os.close(lock)
