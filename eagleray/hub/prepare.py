"""Finding or fetching the files of a configuration's model: once for a deployment, and then on each of its nodes.

Names are searched in this order: a directory, the cache, the hub.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from eagleray.config.json_files import shown
from eagleray.config.resolve import served_names
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError
from eagleray.hub.cache import COMMIT, DEFAULT_REVISION, REVISION, CachedRepo, is_hub_id, is_offline
from eagleray.hub.download import download
from eagleray.hub.gguf.files import find_gguf, is_pinned_gguf
from eagleray.hub.gguf.unpack import unpack_gguf
from eagleray.hub.hub_errors import HubUnreachable, incomplete_offline, not_cached_offline
from eagleray.hub.locate import checkpoint_dir, tokenizer_dir
from eagleray.hub.model_json import generation_file
from eagleray.hub.needs import NeededFiles, missing_file
from eagleray.hub.options import HubOptions
from eagleray.hub.repo_files import choose_files
from eagleray.hub.url_models import fetch_url, is_url
from eagleray.log import get_logger

logger = get_logger(__name__)

Result = TypeVar("Result")

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 2.0, 30.0
"""Pauses of a node between two attempts to reach a hub: a short outage must not cost an engine."""


def prepare_model(model: ModelConfig) -> ModelConfig:
    """Return the configuration pinned to directories, commits and copies that are on this host and complete.

    Called once, by the program that starts the engines. Idempotent. Raises `CheckpointError`, `ConfigError` and
    `DeadlineExceeded`.
    """
    # absolute, because other processes may have other working directories
    if model.download_dir and not model.download_dir.startswith("~"):
        model = msgspec.structs.replace(model, download_dir=str(Path(model.download_dir).absolute()))
    options = HubOptions.of(model)
    model = _with_own_tokenizer(_with_gguf_paths(model))
    revision = tokenizer_revision = None
    config_path = model.hf_config_path
    if model.model is not None:
        revision = pin(model.model, model.revision, _checkpoint_needs(model), options)
    if model.tokenizer is not None and not model.skip_tokenizer_init:
        needs = NeededFiles(tokenizer=True)
        tokenizer_revision = pin(model.tokenizer, model.tokenizer_revision, needs, options, kind="tokenizer")
    if config_path is not None:
        config_path = _pin_config(config_path, options)
    model = msgspec.structs.replace(
        model, revision=revision, tokenizer_revision=tokenizer_revision, hf_config_path=config_path
    )
    checkpoint_dir(model)
    generation_file(model)  # raises for a directory without one
    if not model.skip_tokenizer_init:
        tokenizer_dir(model)
    return model


def fetch_model(model: ModelConfig, *, timeout: float, with_weights: bool) -> None:
    """Fetch the files of a pinned configuration that this node lacks, without those of the tokenizer; the processes of
    a node do it once.

    Directories are not checked. `timeout`: seconds to wait for another process that fetches them, and for a hub that
    does not answer.
    """
    options = HubOptions.of(model, lock_timeout=timeout)
    retry_while_unreachable(lambda: _fetch_pinned(model, options, with_weights=with_weights), timeout=timeout)


def retry_while_unreachable(fetch: Callable[[], Result], *, timeout: float) -> Result:
    """Return what `fetch` returns. It is called again, for up to `timeout` seconds, while a hub does not answer."""
    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE_SECONDS
    while True:
        try:
            return fetch()
        except HubUnreachable as error:
            if time.monotonic() + pause > deadline:
                raise CheckpointError(str(error)) from error
            logger.warning("%s; trying again in %.0f s", error, pause)
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)


def _fetch_pinned(model: ModelConfig, options: HubOptions, *, with_weights: bool) -> None:
    if model.model is not None and model.revision is not None:
        needs = _checkpoint_needs(model)
        needs = NeededFiles(config=needs.config, weights=needs.weights and with_weights)
        pin_remote(model.model, model.revision, needs, options)
    if model.hf_config_path is not None:
        _pin_config(model.hf_config_path, options)


def pin(name: str, revision: str | None, needs: NeededFiles, options: HubOptions, *, kind: str = "model") -> str | None:
    """Find a model or fetch it. Returns None for a directory, or else what `pin_remote` does. The name of a GGUF file
    must be its absolute path."""
    if _directory(name) is not None:
        return None
    if is_pinned_gguf(name) and _is_file(name):
        return unpack_gguf(name, needs, options)
    if not is_url(name):
        _check_name(name, kind)
    return pin_remote(name, revision, needs, options)


def pin_remote(name: str, revision: str | None, needs: NeededFiles, options: HubOptions) -> str:
    """Find a model that is no directory, or fetch it. Returns the commit, or the key of the copy of a URL, or of a GGUF
    file."""
    if is_pinned_gguf(name):
        return unpack_gguf(name, needs, options, key=revision)
    if is_url(name):
        is_key = revision is not None and COMMIT.fullmatch(revision) is not None
        return fetch_url(name, needs, options, key=revision if is_key else None)
    return _pin_hub_model(CachedRepo(options.cache, name), _checked(revision or DEFAULT_REVISION), needs, options)


def _pin_hub_model(repo: CachedRepo, revision: str, needs: NeededFiles, options: HubOptions) -> str:
    commit = repo.find_commit(revision)
    if commit is not None:
        missing = missing_file(repo.snapshot(commit), needs)
        if missing is None:
            _complete_listed(repo, commit, needs, options)
            return commit
        if is_offline():
            raise incomplete_offline(repo, revision, str(repo.snapshot(commit) / missing))
        logger.info("%s: the cache lacks %s: going on with its download", repo.repo_id, missing)
    elif is_offline():
        raise not_cached_offline(repo, revision)
    # The commit that a broken download began with, so that its files are of use.
    return download(repo, commit or revision, needs, options)


def _complete_listed(repo: CachedRepo, commit: str, needs: NeededFiles, options: HubOptions) -> None:
    """Fetch files that the repository has and the snapshot lacks, if the model can be served without them: a program
    that filled the cache was killed, or chose fewer files. Without the hub the snapshot is used as it is."""
    if is_offline():
        return
    listed = repo.listed_files(commit)
    try:
        chosen = choose_files(repo.repo_id, listed, needs, options.ignore_patterns) if listed else []
        if not all((repo.snapshot(commit) / name).is_file() for name in chosen):
            download(repo, commit, needs, options)
    except CheckpointError as error:
        logger.warning("the model is served without some files of its repository: %s", error)


def _pin_config(config_path: str, options: HubOptions) -> str:
    """Return `hf_config_path` pinned: a directory as it is, or an id with its commit behind `@`."""
    if _directory(config_path) is not None:
        return config_path
    name, _, revision = config_path.partition("@")
    commit = pin(name, revision or None, NeededFiles(config=True), options, kind="configuration")
    return config_path if commit is None else f"{name}@{commit}"


def _with_own_tokenizer(model: ModelConfig) -> ModelConfig:
    """Name the model as its tokenizer's repository if the tokenizer has a revision of its own."""
    if model.tokenizer is not None or model.model is None or model.tokenizer_revision in (None, model.revision):
        return model
    return msgspec.structs.replace(model, tokenizer=model.model)


def _with_gguf_paths(model: ModelConfig) -> ModelConfig:
    """Name GGUF files by their absolute paths. The model keeps the name that was given in the API."""
    if model.tokenizer is not None and (path := find_gguf(model.tokenizer)) is not None:
        model = msgspec.structs.replace(model, tokenizer=str(path))
    if model.model is not None and (path := find_gguf(model.model)) is not None:
        model = msgspec.structs.replace(model, served_model_name=served_names(model), model=str(path))
    return model


def _checkpoint_needs(model: ModelConfig) -> NeededFiles:
    return NeededFiles(
        config=model.hf_config_path is None,
        weights=model.load_format != "dummy",
        tokenizer=model.tokenizer is None and not model.skip_tokenizer_init,
    )


def _directory(name: str) -> Path | None:
    """Return the directory of a name; None if there is no such directory."""
    try:
        path = Path(name).expanduser()
        return path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # a name that no file can have, or ~USER of nobody
        return None


def _check_name(name: str, kind: str) -> None:
    """Raise `CheckpointError` unless a name that is no directory may be the id of a model."""
    if name.lower().endswith(".gguf"):
        raise CheckpointError(f"{kind} {name!r}: there is no such file; a GGUF file is given by its path")
    if _is_file(name):
        raise CheckpointError(f"{kind} {name!r} is a file; give the directory that it is in")
    if not is_hub_id(name):
        raise CheckpointError(
            f"{kind} {shown(name)}: there is no such directory, and it is no model id such as Qwen/Qwen3-0.6B. Give "
            "the path of a directory with config.json and *.safetensors files, an id, or a URL such as s3://bucket/model"
        )


def _is_file(name: str) -> bool:
    try:
        return Path(name).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def _checked(revision: str) -> str:
    if COMMIT.fullmatch(revision) is None and REVISION.fullmatch(revision) is None:
        raise CheckpointError(f"option `revision`: {shown(revision)} is not a branch, a tag or a commit")
    return revision
