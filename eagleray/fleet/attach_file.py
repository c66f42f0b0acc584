"""The file by which external clients find the supervisor, see docs/wire.md."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from eagleray.errors import ConfigError


@contextlib.contextmanager
def attach_file(path: Path, *, instance: str, supervisor: str, model: str) -> Iterator[None]:
    """Within the block, the file exists, complete and readable by this user only.

    `supervisor` is the address of the supervisor's inbox. Raises `ConfigError` if the file cannot be written.
    """
    version = importlib.metadata.version("eagleray")
    fields = {"instance": instance, "supervisor": supervisor, "model": model, "version": version}
    content = json.dumps(fields) + "\n"
    try:
        _write(path, content)
    except OSError as error:
        raise ConfigError(f"option `attach_file`: cannot write {path}: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the user removed it or the directory
            if path.read_text() == content:  # another instance may have replaced it
                path.unlink()


def _write(path: Path, content: str) -> None:
    """Write the file atomically. The mode of a temporary file is 0600."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "w") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
