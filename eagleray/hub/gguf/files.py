"""GGUF files by the names of models, and the directories in the cache that have the files made of their headers."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from eagleray.errors import CheckpointError

SUFFIX = ".gguf"
FORMAT = 1
"""Number that changes with the files that are made of a header, so that older ones are made again."""
KEY_BYTES = 32 << 20
"""Bytes at the start of a file that its key is made of: more than the header of a published model has."""
KEY_CHARS = 40
"""Length of a key, which is that of a commit."""


def find_gguf(name: str) -> Path | None:
    """Return the absolute path of the GGUF file that a name means: that of the file, or of a directory with a single
    GGUF file and no safetensors file. None if the name means something else.

    Raises `CheckpointError` for a directory in which several files might be meant.
    """
    try:
        path = Path(name).expanduser().absolute()
        if path.is_file():
            return path if path.suffix.lower() == SUFFIX else None
        if not path.is_dir():
            return None
        entries = sorted(path.iterdir())
    except (OSError, RuntimeError, ValueError):  # a name that no file can have, or ~USER of nobody
        return None
    found = [entry for entry in entries if entry.suffix.lower() == SUFFIX and entry.is_file()]
    if not found or any(entry.name.endswith((".safetensors", ".safetensors.index.json")) for entry in entries):
        return None
    if len(found) > 1:
        names = ", ".join(entry.name for entry in found[:3]) + (" …" if len(found) > 3 else "")
        raise CheckpointError(f"{path}: there are {len(found)} GGUF files ({names}); give the path of one of them")
    return found[0]


def is_pinned_gguf(name: str) -> bool:
    """Whether the name of a model in a pinned configuration is that of a GGUF file."""
    return os.path.isabs(name) and name.lower().endswith(SUFFIX)


def gguf_directory(cache: Path, name: str, key: str) -> Path:
    """Return the directory with the files that were made of the header of a GGUF file."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return cache / f"gguf--{digest[:16]}" / "snapshots" / key


def key_of(path: Path) -> str:
    """Return a key of the header of a file, and of its size."""
    try:
        with path.open("rb") as file:
            start = file.read(KEY_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return hashlib.sha256(b"%d %d " % (FORMAT, size) + start).hexdigest()[:KEY_CHARS]
