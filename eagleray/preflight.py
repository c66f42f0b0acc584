"""The checks of a model's options against its files, before a process is started."""

from __future__ import annotations

from pathlib import Path

import msgspec

from eagleray.client.text.chat_template import read_template
from eagleray.config.resolve import max_model_len
from eagleray.config.sections import CacheConfig, Config, ModelConfig
from eagleray.config.speculation import speculation
from eagleray.errors import CheckpointError, ConfigError
from eagleray.grammars.whitespace import check_whitespace
from eagleray.hub.draft_model import find_draft_model
from eagleray.hub.model_json import config_file, read_config
from eagleray.hub.prepare import prepare_model
from eagleray.models.config_file import ConfigFile
from eagleray.models.option_checks import (
    check_stated_cache,
    check_stated_draft_layer,
    check_stated_quantization,
    check_stated_stages,
)
from eagleray.models.rope_config import stated_length
from eagleray.worker.draft_files import check_draft_model


def checked_config(config: Config) -> Config:
    """Return the configuration with its model checked and pinned, see `checked_model`. A draft model is found or
    fetched, too, and compared with the model."""
    drafts = speculation(config.scheduling.speculative_config)
    model = checked_model(config.model)
    file = _config_file(model)
    check_stated_stages(file, config.parallel.pipeline_parallel_size)
    check_stated_quantization(file, model.quantization, model.dtype)
    check_stated_cache(config.cache.kv_cache_dtype, model.dtype)
    _check_num_blocks(config.cache, model, file)
    if drafts is not None and drafts.method == "mtp":
        check_stated_draft_layer(file)
    if drafts is not None and drafts.model:
        draft = find_draft_model(model, drafts)
        check_draft_model(draft, model)
        try:
            check_stated_quantization(_config_file(draft), draft.quantization, model.dtype)
        except ConfigError as error:
            raise ConfigError(f"the draft model {drafts.model} (`speculative_config`): {error}") from None
    return msgspec.structs.replace(config, model=model)


def checked_model(model: ModelConfig) -> ModelConfig:
    """Check the options whose errors would otherwise end processes after their start, and return the configuration
    pinned, see `prepare_model`. Raises `CheckpointError`, `ConfigError` and `DeadlineExceeded`."""
    from eagleray.client.answers.choose import choose_formats  # imports tokenizers, which --help does without

    choose_formats(model, None)
    check_whitespace(model.structured_outputs_whitespace, model.structured_outputs_backend)
    if model.chat_template is not None:  # before a download
        read_template(Path(model.chat_template).expanduser())
    model = prepare_model(model)
    file = _config_file(model)
    if (length := _stated_length(file)) is not None:
        max_model_len(model, length, file.path)
    return model


def _config_file(model: ModelConfig) -> ConfigFile:
    return ConfigFile(config_file(model), read_config(model))


def _stated_length(file: ConfigFile) -> int | None:
    """Return the tokens that the model was made for, or None if the engine has to find the error in config.json."""
    try:
        return stated_length(file)
    except CheckpointError:  # the engine names an architecture that is not supported before it reads other fields
        return None


def _check_num_blocks(cache: CacheConfig, model: ModelConfig, file: ConfigFile) -> None:
    """Raise `ConfigError` if `num_kv_blocks` has no room for one sequence of full length."""
    if cache.num_kv_blocks is None or model.max_model_len == "auto" or (length := _stated_length(file)) is None:
        return
    length = max_model_len(model, length, file.path)
    fits, needed = cache.num_kv_blocks * cache.block_size, -(-length // cache.block_size)
    if cache.num_kv_blocks < needed:
        raise ConfigError(
            f"option `num_kv_blocks`: {cache.num_kv_blocks} means room for {fits} tokens, but one sequence of "
            f"{length} tokens needs {needed} blocks: set `num_kv_blocks` to at least {needed}, or `max_model_len` to "
            f"at most {fits}"
        )
