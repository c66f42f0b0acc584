"""The safetensors files of a checkpoint directory, and the tensors that their headers list."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eagleray.config.json_files import read_json_object, shown
from eagleray.errors import CheckpointError
from eagleray.hub.needs import INDEX_FILE, MAX_INDEX_BYTES, SINGLE_FILE

DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
WORDS = "I32"
"""Dtype of words that have several numbers of few bits."""
PACKED = "U8"
"""Dtype of encoded tensors, whose elements are not parameters themselves."""
PREFIX = "model."
FIRST_LAYER = "layers.0."
HEAD_PREFIXES = ("lm_head.", "score.")
LENGTH_BYTES = 8
"""Bytes of the number before a header, which is the header's length."""


def stored_dtype(directory: Path) -> str:
    """Return the dtype of the first weight that is of float32, float16 or bfloat16. Raises `CheckpointError`."""
    paths = weight_files(directory)
    for path in paths:
        file = open_file(path)
        with file:
            kinds = (file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
            if (kind := next((kind for kind in kinds if kind in DTYPE_NAMES), None)) is not None:
                return DTYPE_NAMES[kind]
    raise CheckpointError(f"{paths[0]}: there are no weights of float32, float16 or bfloat16")


def read_headers(directory: Path, *, numbers_per_word: int = 1) -> tuple[int, set[str]]:
    """Return the number of parameters in all weight files, where a byte of four-bit weights counts as two and a word as
    `numbers_per_word`, and the names of the tensors. Raises `CheckpointError`."""
    num_parameters, names = 0, set[str]()
    counts = {PACKED: 2, WORDS: numbers_per_word}
    for path in weight_files(directory):
        with open_file(path) as file:
            for name in file.keys():  # noqa: SIM118
                stored = file.get_slice(name)
                num_parameters += math.prod(stored.get_shape()) * counts.get(stored.get_dtype(), 1)
                names.add(name)
    return num_parameters, set(full_names(names))


def full_names(stored: Collection[str]) -> dict[str, str]:
    """Return the stored names by the names that models have. Checkpoints without a head are often stored without the
    prefix that all tensors but the heads' have beside a head."""
    if not any(name.startswith(FIRST_LAYER) for name in stored):
        return {name: name for name in stored}
    return {name if name.startswith(HEAD_PREFIXES) else f"{PREFIX}{name}": name for name in stored}


def header_bytes(path: Path) -> int:
    """Return the size of everything in a safetensors file but its tensors."""
    with path.open("rb") as file:
        return LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")


def weight_files(directory: Path) -> list[Path]:
    """Return the single file, or the shards that the index names."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(
            f"{directory}: there is neither {SINGLE_FILE} nor {INDEX_FILE}; weights are read from safetensors files "
            "only (for random weights instead: --load-format dummy)"
        )
    weight_map = read_json_object(index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(
            f"{index}: is not an index of safetensors files: its `weight_map` must name a file for each tensor, but it "
            f"is {shown(weight_map)}"
        )
    shards = sorted(set(weight_map.values()))
    if not shards:
        raise CheckpointError(f"{index}: its `weight_map` names no file")
    for shard in shards:
        if not _is_file(path := directory / shard):
            raise CheckpointError(f"{path}: not found, but {index} names it; the download may be incomplete")
    return [directory / shard for shard in shards]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def open_file(path: Path) -> Any:
    """Open a safetensors file. This checks that the file is as long as its header says."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: is not a complete safetensors file ({error}); it may be truncated or damaged: copy it again, or "
            f'remove a downloaded one by `rm "$(realpath {path})"`, and the next start fetches it'
        ) from error
