"""Finding or fetching a checkpoint that takes the place of that of the start, while API servers keep its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from eagleray.config.json_files import read_json_object
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError, ConfigError, InvalidRequest
from eagleray.hub.gguf.files import find_gguf
from eagleray.hub.locate import checkpoint_dir, tokenizer_dir
from eagleray.hub.model_json import read_config
from eagleray.hub.needs import TOKENIZER_FILE, NeededFiles, missing_file
from eagleray.hub.options import HubOptions
from eagleray.hub.prepare import pin

SAME_FIELDS = ("architectures", "vocab_size")
"""Fields of config.json that decide what clients may send and get."""

NOT_COMPARED = ("version", "truncation", "padding")
"""Fields of tokenizer.json that do not matter here."""

MAX_TOKENIZER_BYTES = 256 * 2**20
"""Bound for the size of tokenizer.json; published ones have up to about 35 MiB."""


def prepare_replacement(start: ModelConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed options with `model` and `revision` pinned, see `prepare_model`.

    Raises `InvalidRequest` if there is no such checkpoint, if it is not complete, or if it has another architecture,
    vocabulary or tokenizer than that of `start`.
    """
    name, revision = changes["model"], changes.get("revision")
    needs = NeededFiles(config=start.hf_config_path is None, weights=start.load_format != "dummy")
    try:
        if name is not None and (gguf := find_gguf(name)) is not None:
            name = str(gguf)
        elif name is not None and Path(name).expanduser().is_dir():
            name = str(Path(name).expanduser().absolute())
        pinned = None if name is None else pin(name, revision, needs, HubOptions.of(start))
        model = msgspec.structs.replace(start, model=name, revision=pinned)
        directory = checkpoint_dir(model)
        if (missing := missing_file(directory, needs)) is not None:
            raise CheckpointError(f"{directory / missing}: not found")
        _check_same(start, model)
    except (CheckpointError, ConfigError) as error:
        raise InvalidRequest(str(error), param="model") from None
    return {**changes, "model": name, "revision": pinned}


def _check_same(start: ModelConfig, model: ModelConfig) -> None:
    before, after = read_config(start), read_config(model)
    for field in SAME_FIELDS:
        if before.get(field) != after.get(field):
            raise CheckpointError(
                f"{checkpoint_dir(model)}: `{field}` in config.json is {after.get(field)}, but the running model has "
                f"{before.get(field)}: start another server for this checkpoint"
            )
    own_tokenizer = checkpoint_dir(model) / TOKENIZER_FILE
    keeps_tokenizer = start.tokenizer is not None or start.skip_tokenizer_init or not own_tokenizer.is_file()
    if not keeps_tokenizer and _tokenizer(own_tokenizer) != _tokenizer(tokenizer_dir(start) / TOKENIZER_FILE):
        raise CheckpointError(
            f"{own_tokenizer}: the tokenizer is not that of the running model, which API servers keep: start another "
            "server for this checkpoint, or remove the file if the checkpoint was trained with the running tokenizer"
        )


def _tokenizer(path: Path) -> dict[str, Any]:
    return {
        name: value
        for name, value in read_json_object(path, max_bytes=MAX_TOKENIZER_BYTES).items()
        if name not in NOT_COMPARED
    }
