"""The option `speculative_config`: how tokens are drafted, with the names of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from eagleray.config.sections import Config
from eagleray.config.suggestions import suggest
from eagleray.errors import ConfigError

METHODS = ("ngram",)

DEFAULT_LOOKUP = 5
"""Tokens of an n-gram that is looked up, where neither `prompt_lookup_min` nor `prompt_lookup_max` is given."""

MAX_DRAFT_TOKENS = 64
"""Most tokens that are drafted in one step, of all requests together. It bounds the memory for their logits."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Values of `speculative_config`, with those that were left out."""

    method: Literal["ngram"]
    num_speculative_tokens: int
    """Most tokens that are drafted for a request in one step."""
    prompt_lookup_min: int
    prompt_lookup_max: int
    """Least and most last tokens of a request that are looked up among its tokens before."""


class _Given(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of `speculative_config` that a user gave."""

    method: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None


def speculation(options: Mapping[str, Any]) -> Speculation | None:
    """Return the values of `speculative_config`; None if it is empty, which means no speculation. Raises `ConfigError`
    for a field or a value that is not supported."""
    if not options:
        return None
    known = [field.name for field in msgspec.structs.fields(_Given)]
    for name in options:
        if name not in known:
            meant = suggest(name, known, {})
            hint = f"did you mean `{meant}`?" if meant else f"there are {', '.join(known)}"
            raise _error(f"there is no field `{name}`; {hint}")
    try:
        given = msgspec.convert(options, _Given, strict=False)
    except msgspec.ValidationError as error:
        raise _error(str(error)) from None
    if given.method not in METHODS:
        what = "missing" if given.method is None else f"{given.method!r}, which is not supported"
        raise _error(f"`method` is {what}; it must be {' or '.join(METHODS)}")
    num_tokens = given.num_speculative_tokens
    if num_tokens is None or not 1 <= num_tokens <= MAX_DRAFT_TOKENS:
        raise _error(f"`num_speculative_tokens` must be a number from 1 to {MAX_DRAFT_TOKENS}, but it is {num_tokens}")
    least, most = given.prompt_lookup_min, given.prompt_lookup_max
    least, most = least or most or DEFAULT_LOOKUP, most or least or DEFAULT_LOOKUP
    if not 1 <= least <= most:
        raise _error(
            f"`prompt_lookup_min` must be at least 1 and at most `prompt_lookup_max`, but they are {least} and {most}"
        )
    return Speculation(
        method="ngram", num_speculative_tokens=num_tokens, prompt_lookup_min=least, prompt_lookup_max=most
    )


def check_speculation(config: Config) -> None:
    """Raise `ConfigError` for a wrong `speculative_config`."""
    speculation(config.scheduling.speculative_config)


def _error(reason: str) -> ConfigError:
    return ConfigError(f"option `speculative_config`: {reason}")
