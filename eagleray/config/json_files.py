"""Reading of a checkpoint's JSON files, which are untrusted: bounded in size, with every problem as a `CheckpointError`
of one sentence."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from eagleray.errors import CheckpointError

MAX_JSON_BYTES = 32 * 2**20
"""Size limit of a file that is parsed; the files of published checkpoints have a few megabytes at most. A parsed file
takes up to thirty times its size in memory."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80
_REPR.maxlevel = 3


def shown(value: Any) -> str:
    """Return a value of a file as a message shows it: its `repr`, shortened."""
    return _REPR.repr(value)


def read_bounded(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a file. Raises `CheckpointError` if it is larger than `max_bytes` or cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if len(data) > max_bytes:
        raise CheckpointError(
            f"{path}: is larger than {max_bytes // 2**20} MiB, which no file of this kind is; it may be damaged"
        )
    return data


def read_json_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in a file. Raises `CheckpointError` if it holds anything else."""
    try:
        value = json.loads(read_bounded(path, max_bytes=max_bytes))
    except ValueError as error:  # no JSON, not UTF-8, or a number of thousands of digits
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path}: cannot be read as JSON: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, but holds a {type(value).__name__}")
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file, or return an empty one without the file. Raises as `read_json_object` does."""
    return read_json_object(path) if path.is_file() else {}
