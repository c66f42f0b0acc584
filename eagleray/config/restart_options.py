"""Options of engines that a rolling restart may change, and the reasons why it changes no others. Pure.

API servers, clients and the supervisor keep the options of the start, so only what engines alone use may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from eagleray.config.build import build_config, field_owners, unknown_option
from eagleray.config.resolve import DEMO_MODEL_DIR, served_names
from eagleray.config.sections import Config, ModelConfig
from eagleray.config.vllm_options import translate
from eagleray.errors import ConfigError, InvalidRequest, UnsupportedParameter

CHANGEABLE = (
    *("model", "revision"),
    *("num_kv_blocks", "kv_cache_memory", "gpu_memory_utilization", "enable_prefix_caching"),
    *("max_num_seqs", "max_num_batched_tokens", "speculative_config"),
    *("attention_backend", "num_threads", "async_scheduling"),
    "watchdog_timeout",
    "log_level",
)
"""Options that a restart may change."""

REASONS: Mapping[str, str] = {
    "model": "API servers and clients rely on it",
    "cache": "clients and other engines rely on it",
    "lora": "the slots for adapters are those of the start",
    "scheduling": "API servers check requests by it",
    "execution": "the supervisor and all workers rely on it",
    "parallel": "it decides which processes there are (`eagleray scale` changes the number of engines)",
    "ray": "it decides where the processes are",
    "recovery": "the supervisor and clients rely on it",
    "observability": "API servers use it",
    "serving": "API servers use it",
}
"""Why no other option of a section can be changed, by section."""


def requested_changes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a restart is to change, with values of the options' types. Names of vLLM are translated;
    None stands for the default.

    Raises `InvalidRequest`, whose `param` is the option, for one that does not exist or cannot be changed.
    """
    owners = field_owners()
    changes: dict[str, Any] = {}
    for given, value in options.items():
        try:
            if value is None:
                names = {given.replace("-", "_"): None}
            else:
                translated = translate({given: value}, owners.keys())
                names = translated.options
                if not names:
                    raise InvalidRequest(translated.notes[0], param=given)
            for name in names:
                if name not in owners:
                    raise unknown_option(name)
                if name not in CHANGEABLE:
                    changeable = ", ".join(CHANGEABLE)
                    raise UnsupportedParameter(
                        f"option `{name}` cannot be changed by a restart of engines, because {REASONS[owners[name]]}; "
                        f"these can: {changeable}",
                        param=given,
                    )
                changes[name] = getattr(getattr(build_config(**{name: names[name]}), owners[name]), name)
        except ConfigError as error:
            raise InvalidRequest(str(error), param=given) from None
    if "revision" in changes and "model" not in changes:
        raise InvalidRequest("`revision` is that of a model id: give `model` too", param="revision")
    return changes


def with_changes(config: Config, changes: Mapping[str, Any], *, max_model_len: int) -> Config:
    """Return the configuration of engines with these `requested_changes`. A new checkpoint keeps the name, the
    tokenizer and the longest sequence that clients know; `max_model_len` is the latter."""
    owners = field_owners()
    for section in {owners[name] for name in changes}:
        own = {name: value for name, value in changes.items() if owners[name] == section}
        before = getattr(config, section)
        if isinstance(before, ModelConfig):
            before = _kept(before, max_model_len)
            own = {"revision": None, **own}
        config = msgspec.structs.replace(config, **{section: msgspec.structs.replace(before, **own)})
    return config


def changed_options(start: Config, now: Config) -> dict[str, Any]:
    """Return the options of `CHANGEABLE` that differ from those of the start, by name."""
    owners = field_owners()
    values = {name: getattr(getattr(now, owners[name]), name) for name in CHANGEABLE}
    return {name: value for name, value in values.items() if value != getattr(getattr(start, owners[name]), name)}


def _kept(model: ModelConfig, max_model_len: int) -> ModelConfig:
    """Return the options of a model that has another checkpoint from now on, with what clients rely on made
    explicit."""
    tokenizer, revision = model.tokenizer, model.tokenizer_revision
    if tokenizer is None:
        tokenizer, revision = (str(DEMO_MODEL_DIR), None) if model.model is None else (model.model, model.revision)
    return msgspec.structs.replace(
        model,
        served_model_name=served_names(model),
        tokenizer=tokenizer,
        tokenizer_revision=revision,
        max_model_len=max_model_len if model.max_model_len is None else model.max_model_len,
    )
