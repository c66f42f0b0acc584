"""Check of free space before a download."""

from __future__ import annotations

import shutil
from pathlib import Path

from eagleray.errors import CheckpointError


def check_space(directory: Path, needed: int, *, name: str) -> None:
    """Raise `CheckpointError` if `needed` bytes do not fit on the disk of `directory`, which need not exist yet."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise full_disk(name, directory, f"{_gib(needed)} are needed, but {_gib(free)} are free")


def full_disk(name: str, directory: Path, problem: str) -> CheckpointError:
    """Return the error for a model that does not fit on a disk."""
    return CheckpointError(
        f"model {name!r}: the disk of {str(directory)!r} is too full: {problem}; free some, or choose another disk "
        "with `--download-dir` or HF_HOME"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**20 else f"{size:,} bytes"
