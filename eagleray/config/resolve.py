"""Rules that follow from the configuration and the files it names. Pure: each one a named function."""

from __future__ import annotations

import re
from pathlib import Path

from eagleray.config.sections import CacheConfig, ModelConfig
from eagleray.errors import CheckpointError, ConfigError

__all__ = ["DEMO_MODEL_DIR", "cache_bytes", "checkpoint_dir", "served_names", "tokenizer_dir"]

DEMO_MODEL_DIR = Path(__file__).parent.parent / "demo_model"
DEMO_MODEL_NAME = "eagleray-demo"

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def checkpoint_dir(model: ModelConfig) -> Path:
    """The directory of the checkpoint.

    Raises `CheckpointError` if it is not a directory or has no config.json.
    """
    if model.model is None:
        return DEMO_MODEL_DIR
    path = Path(model.model).expanduser()
    if not path.is_dir():
        raise CheckpointError(
            f"model {model.model!r}: there is no such directory. eagleray reads checkpoints from disk: give the path "
            "of a directory with config.json and *.safetensors files"
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path / 'config.json'}: not found; a checkpoint in Hugging Face format has one")
    return path


def tokenizer_dir(model: ModelConfig) -> Path:
    """The directory of the tokenizer's files."""
    if model.tokenizer is None:
        return checkpoint_dir(model)
    path = Path(model.tokenizer).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"tokenizer {model.tokenizer!r}: there is no such directory")
    return path


def served_names(model: ModelConfig) -> list[str]:
    """Names of the model in the API; never empty."""
    if model.served_model_name:
        return model.served_model_name
    return [model.model if model.model is not None else DEMO_MODEL_NAME]


def cache_bytes(cache: CacheConfig) -> int | None:
    """`kv_cache_memory` in bytes; None if it is to be sized from memory."""
    if cache.kv_cache_memory is None or isinstance(cache.kv_cache_memory, int):
        return cache.kv_cache_memory
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", cache.kv_cache_memory.upper())
    if match is None:
        raise ConfigError(
            f"`kv_cache_memory` must be a number of bytes or a size such as 512MiB or 4GB, "
            f"but it is {cache.kv_cache_memory!r}"
        )
    return int(float(match[1]) * UNITS[match[2]])
