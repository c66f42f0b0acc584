"""Reads a model's default sampling parameters and its end-of-sequence ids, with the changes of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagleray.client.text.end_tokens import first_eos_token_ids
from eagleray.config.json_files import read_optional_json_object
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError, ConfigError, InvalidRequest
from eagleray.hub.locate import checkpoint_dir, config_dir
from eagleray.hub.model_json import GENERATION_FILE, generation_file, read_optional_config
from eagleray.messages.sampling import SamplingParams

SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Field of generation_config.json → field of `SamplingParams`. As in vLLM, `do_sample` is ignored."""


def default_sampling(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of `SamplingParams` for which the model's generation_config.json, or the option
    `override_generation_config`, has a value.

    Raises `CheckpointError` for an invalid value of the file, and `ConfigError` for one of the options.
    """
    path = generation_file(model)
    found = {} if path is None else read_optional_json_object(path)
    if (problem := _problem(found)) is not None:
        raise CheckpointError(f"{path}: {problem}; `generation_config` none ignores this file")
    found |= model.override_generation_config
    if (problem := _problem(found)) is not None:
        raise ConfigError(f"option `override_generation_config`: {problem}")
    return _sampling_fields(found)


def model_eos_token_ids(model: ModelConfig) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, or else of config.json, after the changes that the
    configuration asks for. `generation_config` none leaves out sampling parameters only: ids still end a sequence."""
    path = generation_file(model) or checkpoint_dir(model) / GENERATION_FILE
    generation = read_optional_json_object(path) | model.override_generation_config
    return first_eos_token_ids([(path, generation), (config_dir(model) / "config.json", read_optional_config(model))])


def _sampling_fields(found: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: found[name] for name, ours in SAMPLING_FIELDS.items() if found.get(name) is not None}


def _problem(found: Mapping[str, Any]) -> str | None:
    """Return the fault of a value; None if all are valid."""
    try:
        SamplingParams(**_sampling_fields(found))
    except (InvalidRequest, TypeError, OverflowError) as error:  # TypeError: a list; OverflowError: infinity
        return str(error)
    return None
