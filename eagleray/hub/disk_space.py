"""Check of free space before a download, errors of the disk, and the form of sizes in messages."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from eagleray.errors import CheckpointError


def check_space(directory: Path, needed: int, *, name: str) -> None:
    """Raise `CheckpointError` if `needed` bytes do not fit on the disk of `directory`, which need not exist yet."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise _full_disk(name, directory, f"{format_size(needed)} are needed, but {format_size(free)} are free")


def no_room(error: Exception, directory: Path, *, name: str) -> CheckpointError | None:
    """Return the error for a file of the model `name` that does not fit on the disk; None for any other problem."""
    match error:
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return _full_disk(name, directory, str(error.strerror))
        case OSError(errno=errno.EFBIG):
            return CheckpointError(
                f"model {name!r}: a file of it is larger than this process, or the disk of {str(directory)!r}, may "
                "write: raise the limit of `ulimit -f`, or choose another disk with `--download-dir` or HF_HOME"
            )
        case _:
            return None


def unwritable(purpose: str, directory: Path, problem: str) -> CheckpointError:
    """Return the error for a directory of a cache in which nothing can be written."""
    return CheckpointError(
        f"{purpose}: cannot write to {str(directory)!r}: {problem}: choose another cache with `--download-dir` or "
        "HF_HOME"
    )


def _full_disk(name: str, directory: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"model {name!r}: the disk of {str(directory)!r} is too full: {problem}; free some, or choose another disk "
        "with `--download-dir` or HF_HOME"
    )


def format_size(num_bytes: int) -> str:
    """Return a number of bytes as messages show it."""
    if num_bytes < 2**20:
        return f"{num_bytes:,} bytes"
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
