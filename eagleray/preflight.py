"""The checks of a model's options against its files, before a process is started."""

from __future__ import annotations

from pathlib import Path

import msgspec

from eagleray.client.text.chat_template import read_template
from eagleray.config.resolve import max_model_len
from eagleray.config.sections import Config, ModelConfig
from eagleray.config.speculation import speculation
from eagleray.errors import CheckpointError
from eagleray.grammars.whitespace import check_whitespace
from eagleray.hub.draft_model import find_draft_model
from eagleray.hub.model_json import config_file, read_config
from eagleray.hub.prepare import prepare_model
from eagleray.models.config_file import ConfigFile
from eagleray.models.rope_config import stated_length
from eagleray.worker.draft_files import check_draft_model


def checked_config(config: Config) -> Config:
    """Return the configuration with its model checked and pinned, see `checked_model`. A draft model is found or
    fetched, too, and compared with the model."""
    model, drafts = checked_model(config.model), speculation(config.scheduling.speculative_config)
    if drafts is not None and drafts.model:
        check_draft_model(find_draft_model(model, drafts), model)
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
    config = ConfigFile(config_file(model), read_config(model))
    try:
        length = stated_length(config)
    except CheckpointError:  # the engine names an architecture that is not supported before it reads other fields
        length = None
    if length is not None:
        max_model_len(model, length, config.path)
    return model
