"""Reads a checkpoint's settings for generation: default sampling parameters, and the ids that end a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagleray.config.json_files import read_optional_json_object, shown
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

MAX_TOKEN_ID = 2**31 - 1
"""Token ids have 32 bits."""

MAX_EOS_TOKENS = 1024
"""Published models have up to three."""


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


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, or else of config.json; none if neither has any."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        match read_optional_json_object(path).get("eos_token_id"):
            case None:
                pass
            case list(token_ids) if len(token_ids) <= MAX_EOS_TOKENS and all(map(_is_token_id, token_ids)):
                return tuple(token_ids)
            case token_id if _is_token_id(token_id):
                return (token_id,)
            case other:
                raise CheckpointError(
                    f"{path}: eos_token_id must be a token id or a list of up to {MAX_EOS_TOKENS} of them, but it is "
                    f"{shown(other)}"
                )
    return ()


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID
