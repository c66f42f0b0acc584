"""config.json and generation_config.json of a model, with the changes that its configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagleray.config.json_files import read_json_object, read_optional_json_object
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError, ConfigError
from eagleray.hub.locate import checkpoint_dir, config_dir
from eagleray.hub.needs import CONFIG_FILE

GENERATION_FILE = "generation_config.json"


def config_file(model: ModelConfig) -> Path:
    """Return the path of config.json. Raises `CheckpointError` if it is missing."""
    path = config_dir(model) / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: not found; a checkpoint in Hugging Face format has one")
    return path


def read_config(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json, changed by `hf_overrides`. Raises `CheckpointError`."""
    return merged(read_json_object(config_file(model)), model.hf_overrides)


def read_optional_config(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json, changed by `hf_overrides`; only the changes without the file."""
    return merged(read_optional_json_object(config_dir(model) / CONFIG_FILE), model.hf_overrides)


def generation_file(model: ModelConfig) -> Path | None:
    """Return the path of generation_config.json, which need not exist; None if none is to be read.

    Raises `ConfigError` if the option names a directory without one.
    """
    if model.generation_config == "none":
        return None
    if model.generation_config == "auto":
        return checkpoint_dir(model) / GENERATION_FILE
    path = Path(model.generation_config).expanduser() / GENERATION_FILE
    if not path.is_file():
        raise ConfigError(
            f"option `generation_config`: must be auto, none, or a directory with a {GENERATION_FILE}, but there is no "
            f"{str(path)!r}"
        )
    return path


def merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with those of `overrides` in their place; objects are merged, and None removes a field."""
    result = dict(fields)
    for name, value in overrides.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(old := result.get(name), Mapping):
            result[name] = merged(old, value)
        else:
            result[name] = value
    return result
