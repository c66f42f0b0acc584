"""Files that a model needs, and which of them a directory lacks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from eagleray.config.json_files import read_bounded
from eagleray.errors import CheckpointError

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GGUF_FILE = "gguf.json"
"""File that is made of the header of a GGUF file, see `gguf.unpack`."""

MAX_INDEX_BYTES = 128 * 2**20
"""Bound for the size of an index. Published models with the most experts have one of about 20 MiB."""


@dataclass(frozen=True, kw_only=True)
class NeededFiles:
    """Kinds of files that are read from a directory."""

    config: bool = False
    weights: bool = False
    tokenizer: bool = False


def missing_file(directory: Path, needs: NeededFiles) -> str | None:
    """Return the name of the first needed file that `directory` lacks; None if it is complete.

    A link that leads nowhere, as a download that was broken off may leave, counts as a missing file.
    """
    if needs.config and not (directory / CONFIG_FILE).is_file():
        return CONFIG_FILE
    if needs.weights and (name := _missing_weights(directory)) is not None:
        return name
    if needs.tokenizer and not (directory / TOKENIZER_FILE).is_file():
        return TOKENIZER_FILE
    return _broken_link(directory)


def _missing_weights(directory: Path) -> str | None:
    if (directory / SINGLE_FILE).is_file() or (directory / GGUF_FILE).is_file():
        return None
    index = directory / INDEX_FILE
    if not index.is_file():
        return SINGLE_FILE
    for name in _shards(index):
        if not (directory / name).is_file():
            return name
    return None


def _shards(index: Path) -> list[str]:
    """Return the files that an index names; none for an index that is no such JSON, which the loader reports."""
    try:
        weight_map = json.loads(read_bounded(index, max_bytes=MAX_INDEX_BYTES)).get("weight_map")
        return sorted({name for name in weight_map.values() if isinstance(name, str) and "\0" not in name})
    except (CheckpointError, ValueError, AttributeError, RecursionError):
        return []


def _broken_link(directory: Path) -> str | None:
    try:
        links = sorted(entry.name for entry in directory.iterdir() if entry.is_symlink() and not entry.exists())
    except OSError:
        return None
    return next((name for name in links if name.endswith((".json", ".jinja", ".safetensors"))), None)
