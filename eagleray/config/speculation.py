"""The option `speculative_config`: how tokens are drafted, with the names of vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from eagleray.config.suggestions import suggest
from eagleray.errors import ConfigError

Value = TypeVar("Value", int, float)

METHODS = ("ngram", "suffix", "draft_model", "mtp")

ALIASES = {"deepseek_mtp": "mtp"}
"""Other names of methods, which vLLM has."""

OWN_FIELDS = {
    "ngram": ("prompt_lookup_",),
    "suffix": ("suffix_decoding_",),
    "draft_model": ("model", "revision", "quantization"),
}
"""Beginnings of the names of the fields that one method alone has."""

Quantization = Literal["fp8", "int8", "int4", "gptq", "awq", "compressed-tensors"]

DEFAULT_LOOKUP = 5
"""Tokens of an n-gram that is looked up, where neither `prompt_lookup_min` nor `prompt_lookup_max` is given."""

MAX_DRAFT_TOKENS = 64
"""Most tokens that are drafted in one step, of all requests together. It bounds the memory for their logits."""


DEFAULT_TREE_DEPTH, DEFAULT_CACHED_REQUESTS, DEFAULT_SPEC_FACTOR, DEFAULT_TOKEN_PROB = 24, 10_000, 1.0, 0.1


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Values of `speculative_config`, with those that were left out."""

    method: Literal["ngram", "suffix", "draft_model", "mtp"]
    num_speculative_tokens: int
    """Most tokens that are drafted for a request in one step."""
    model: str = ""
    """Directory, id or URL of the draft model; empty for the methods without one."""
    revision: str | None = None
    """Branch, tag or commit of its id; None for main."""
    quantization: Quantization | None = None
    """Format to which its weights are quantized when they are loaded; None for that of the checkpoint."""
    prompt_lookup_min: int = DEFAULT_LOOKUP
    prompt_lookup_max: int = DEFAULT_LOOKUP
    """Least and most last tokens of a request that are looked up among its tokens before."""
    suffix_decoding_max_tree_depth: int = DEFAULT_TREE_DEPTH
    """Most last tokens of a request that are compared with those before a place."""
    suffix_decoding_max_cached_requests: int = DEFAULT_CACHED_REQUESTS
    """Number of finished requests whose tokens other requests find."""
    suffix_decoding_max_spec_factor: float = MAX_DRAFT_TOKENS
    """Most tokens of a draft for each token that is equal before the place that it is taken from."""
    suffix_decoding_min_token_prob: float = 0.0
    """Least share of the places with the same tokens before at which a drafted token and all before it follow."""

    @property
    def has_model(self) -> bool:
        """Whether a model proposes tokens: a draft model, or a layer of the checkpoint."""
        return self.method in ("draft_model", "mtp")


class _Given(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of `speculative_config` that a user gave."""

    method: str | None = None
    num_speculative_tokens: int | None = None
    model: str | None = None
    revision: str | None = None
    quantization: Quantization | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None


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
    method = ALIASES.get(given.method or "", given.method)
    if method is None and given.model is not None:
        method = "draft_model"
    if method not in METHODS:
        what = "missing" if method is None else f"{method!r}, which is not supported"
        raise _error(f"`method` is {what}; it must be {', '.join(METHODS[:-1])} or {METHODS[-1]}")
    others = tuple(start for one, starts in OWN_FIELDS.items() if one != method for start in starts)
    for name in options:
        if name.startswith(others):
            raise _error(f"`{name}` is no field of the method {method}")
    if method == "mtp":
        return Speculation(method="mtp", num_speculative_tokens=_num_tokens(_or(given.num_speculative_tokens, 1)))
    if method == "draft_model":
        return _draft_model(given)
    return _ngram(given) if method == "ngram" else _suffix(given)


def _draft_model(given: _Given) -> Speculation:
    if not given.model:
        raise _error("the method draft_model needs `model`, the directory or the id of the draft model")
    return Speculation(
        method="draft_model",
        num_speculative_tokens=_num_tokens(given.num_speculative_tokens),
        model=given.model,
        revision=given.revision,
        quantization=given.quantization,
    )


def _ngram(given: _Given) -> Speculation:
    least, most = given.prompt_lookup_min, given.prompt_lookup_max
    least, most = least or most or DEFAULT_LOOKUP, most or least or DEFAULT_LOOKUP
    if not 1 <= least <= most:
        raise _error(
            f"`prompt_lookup_min` must be at least 1 and at most `prompt_lookup_max`, but they are {least} and {most}"
        )
    num_tokens = _num_tokens(given.num_speculative_tokens)
    return Speculation(
        method="ngram", num_speculative_tokens=num_tokens, prompt_lookup_min=least, prompt_lookup_max=most
    )


def _suffix(given: _Given) -> Speculation:
    depth = _or(given.suffix_decoding_max_tree_depth, DEFAULT_TREE_DEPTH)
    num_cached = _or(given.suffix_decoding_max_cached_requests, DEFAULT_CACHED_REQUESTS)
    factor = _or(given.suffix_decoding_max_spec_factor, DEFAULT_SPEC_FACTOR)
    share = _or(given.suffix_decoding_min_token_prob, DEFAULT_TOKEN_PROB)
    if depth < 1:
        raise _error(f"`suffix_decoding_max_tree_depth` must be at least 1, but it is {depth}")
    if num_cached < 0:
        raise _error(f"`suffix_decoding_max_cached_requests` must be at least 0, but it is {num_cached}")
    if not 0 <= factor < math.inf:
        raise _error(f"`suffix_decoding_max_spec_factor` must be a number from 0, but it is {factor}")
    if not 0 <= share <= 1:
        raise _error(f"`suffix_decoding_min_token_prob` must be a number from 0 to 1, but it is {share}")
    return Speculation(
        method="suffix",
        num_speculative_tokens=_num_tokens(_or(given.num_speculative_tokens, min(depth, MAX_DRAFT_TOKENS))),
        suffix_decoding_max_tree_depth=depth,
        suffix_decoding_max_cached_requests=num_cached,
        suffix_decoding_max_spec_factor=factor,
        suffix_decoding_min_token_prob=share,
    )


def _num_tokens(given: int | None) -> int:
    if given is None or not 1 <= given <= MAX_DRAFT_TOKENS:
        raise _error(f"`num_speculative_tokens` must be a number from 1 to {MAX_DRAFT_TOKENS}, but it is {given}")
    return given


def _or(given: Value | None, default: Value) -> Value:
    return default if given is None else given


def _error(reason: str) -> ConfigError:
    return ConfigError(f"option `speculative_config`: {reason}")
