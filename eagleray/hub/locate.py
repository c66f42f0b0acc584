"""Directories of a model's files, for a configuration that `prepare_model` has pinned. Reads no network.

A pinned configuration names a directory and has no revision, or it names a model by id, URL or GGUF file and has the
commit, or the key of the copy or the file, as revision. The directory of a commit is looked up in the cache of the host
that asks, because hosts may have their caches in different places.
"""

from __future__ import annotations

from pathlib import Path

from eagleray.config.resolve import DEMO_MODEL_DIR
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError
from eagleray.hub.cache import CachedRepo, cache_dir
from eagleray.hub.gguf.files import gguf_directory, is_pinned_gguf
from eagleray.hub.needs import CONFIG_FILE
from eagleray.hub.url_models import is_url, url_directory


def checkpoint_dir(model: ModelConfig) -> Path:
    """Return the directory of the checkpoint.

    Raises `CheckpointError` if it is not a directory or has no config.json.
    """
    if model.model is None:
        return DEMO_MODEL_DIR
    path = pinned_dir(model.model, model.revision, model.download_dir)
    if not path.is_dir():
        raise CheckpointError(
            f"model {model.model!r}: there is no such directory. Give the path of a directory with {CONFIG_FILE} and "
            "*.safetensors files or of a GGUF file, or a model id such as Qwen/Qwen3-0.6B"
        )
    if model.hf_config_path is None and not (path / CONFIG_FILE).is_file():
        raise CheckpointError(f"{path / CONFIG_FILE}: not found; a checkpoint in Hugging Face format has one")
    return path


def tokenizer_dir(model: ModelConfig) -> Path:
    """Return the directory of the tokenizer's files. Raises `CheckpointError` if it is not a directory."""
    if model.tokenizer is None:
        return checkpoint_dir(model)
    path = pinned_dir(model.tokenizer, model.tokenizer_revision, model.download_dir)
    if not path.is_dir():
        raise CheckpointError(f"tokenizer {model.tokenizer!r}: there is no such directory")
    return path


def config_dir(model: ModelConfig) -> Path:
    """Return the directory of config.json."""
    if model.hf_config_path is None:
        return checkpoint_dir(model)
    name, _, revision = model.hf_config_path.partition("@")
    path = Path(model.hf_config_path).expanduser()
    return path if path.is_dir() else pinned_dir(name, revision or None, model.download_dir)


def model_root(model: ModelConfig) -> str:
    """Return the name under which the model was asked for: an id or a URL as it was given, or else the directory or the
    GGUF file."""
    return str(checkpoint_dir(model)) if model.model is None or model.revision is None else model.model


def weight_dir(model: ModelConfig, name: str) -> str:
    """Return the directory `name` of a weight update, where the name of the model stands for its checkpoint."""
    return str(checkpoint_dir(model)) if name == model.model else name


def pinned_dir(name: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the directory `name`, or that of a commit or a key in the cache of this host."""
    if revision is None:
        return Path(name).expanduser()
    if is_url(name):
        return url_directory(cache_dir(download_dir), name, revision)
    if is_pinned_gguf(name):
        return gguf_directory(cache_dir(download_dir), name, revision)
    return CachedRepo(cache_dir(download_dir), name).snapshot(revision)
