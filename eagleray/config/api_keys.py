"""API keys of the server, from the option, a file, and the environment."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from eagleray.config.environment import (
    ADMIN_API_KEY_VARIABLE,
    API_KEY_VARIABLE,
    VLLM_API_KEY_VARIABLE,
    take_variable,
)
from eagleray.config.sections import Config
from eagleray.errors import ConfigError


def with_api_keys(config: Config) -> Config:
    """Return the configuration with the keys of its file and of the environment, which loses them.

    A source that was given and holds no key is an error, because a server without keys would not be what was meant.
    Raises `ConfigError`, which names no key.
    """
    options = config.serving
    keys = [*options.api_key, *_of_file(options.api_key_file)]
    keys += _of_environment(API_KEY_VARIABLE) + _of_environment(VLLM_API_KEY_VARIABLE)
    admin_keys = [*options.admin_api_key, *_of_environment(ADMIN_API_KEY_VARIABLE)]
    for name, given in (("api_key", keys), ("admin_api_key", admin_keys)):
        if not all(given):
            raise ConfigError(f"option `{name}`: a key is empty: give one that is not, or drop the option")
    return _replace(config, keys, admin_keys)


def without_api_keys(config: Config) -> Config:
    """Return the configuration for processes that check no keys."""
    return _replace(config, [], [])


def without_hub_token(config: Config) -> Config:
    """Return the configuration for processes that download no models."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, hf_token=None))


def divided_keys(text: str) -> list[str]:
    """Split the keys of an environment variable."""
    return [key.strip() for key in re.split(r"[,\n]", text) if key.strip()]


def _replace(config: Config, keys: list[str], admin_keys: list[str]) -> Config:
    serving = msgspec.structs.replace(config.serving, api_key=keys, admin_api_key=admin_keys)
    return msgspec.structs.replace(config, serving=serving)


def _of_file(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        text = Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(
            f"option `api_key_file`: cannot read {path!r}: {reason}: name a file with one key a line"
        ) from None
    lines = (line.strip() for line in text.splitlines())
    if keys := [line for line in lines if line and not line.startswith("#")]:
        return keys
    raise ConfigError(f"option `api_key_file`: {path!r} holds no key: write one a line, or drop the option")


def _of_environment(variable: str) -> list[str]:
    text = take_variable(variable)
    if text is None:
        return []
    if keys := divided_keys(text):
        return keys
    raise ConfigError(
        f"the environment variable {variable} is set but holds no key: unset it, or give keys divided by commas"
    )
