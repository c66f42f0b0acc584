"""Reads a checkpoint's default sampling parameters."""

from __future__ import annotations

from typing import Any

from eagleray.config.json_files import read_optional_json_object
from eagleray.config.resolve import checkpoint_dir
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError, InvalidRequest
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
    """Return the fields of `SamplingParams` for which the checkpoint's generation_config.json has a value.

    None of them under `generation_config="none"`. Raises `CheckpointError` for an invalid value.
    """
    if model.generation_config == "none":
        return {}
    path = checkpoint_dir(model) / "generation_config.json"
    found = read_optional_json_object(path)
    defaults = {ours: found[name] for name, ours in SAMPLING_FIELDS.items() if found.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except (InvalidRequest, TypeError, OverflowError) as error:  # TypeError: a list; OverflowError: infinity
        raise CheckpointError(f"{path}: {error}; `generation_config` none ignores this file") from None
    return defaults
