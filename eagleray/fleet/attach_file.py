"""The file that tells front-ends of the user's own where to attach; docs/wire.md says what they do then."""

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
    """The file is there, whole and readable by this user alone, within the block.

    `supervisor`: address of its inbox. Raises `ConfigError` if the file cannot be written.
    """
    version = importlib.metadata.version("eagleray")
    said = {"instance": instance, "supervisor": supervisor, "model": model, "version": version}
    content = json.dumps(said) + "\n"
    try:
        _write(path, content)
    except OSError as error:
        raise ConfigError(f"option `attach_file`: cannot write {path}: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # removed by the user, or the directory is gone
            if path.read_text() == content:  # not another instance's by now
                path.unlink()


def _write(path: Path, content: str) -> None:
    """In one moment. The mode of a temporary file is 0600."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "w") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
