"""The rotary embedding that config.json describes.

Two styles exist: `rope_theta` with `rope_scaling`, and (since transformers 5) one object `rope_parameters`.
"""

from __future__ import annotations

import math
from typing import Any

from eagleray.config.json_files import shown
from eagleray.kernels.rope_spec import DefaultRope, DynamicRope, LinearRope, Llama3Rope, RopeSpec, YarnRope
from eagleray.models.config_file import MAX_POSITIONS, ConfigFile

MAX_FACTOR = 1e6
"""Largest factor of lengths and frequencies; published models have up to a few hundred."""

SUPPORTED = "default, linear, dynamic, llama3 and yarn"


ANY_THETA = 10_000.0
"""Base of the frequencies where only the length is read, which does not depend on it."""


def stated_length(config: ConfigFile) -> int | None:
    """Return the length that config.json says the model was trained for; None if the family's default holds.

    Raises `CheckpointError` as `read_rope` does.
    """
    if config.get("max_position_embeddings") is None:
        return None
    max_positions = config.integer("max_position_embeddings", None, maximum=MAX_POSITIONS)
    rope = read_rope(config, default_theta=ANY_THETA, max_position_embeddings=max_positions)
    return scaled_max_positions(rope, max_positions)


def scaled_max_positions(rope: RopeSpec, max_position_embeddings: int) -> int:
    """Return the length that the model was trained for, scaling included."""
    match rope:
        case DefaultRope() | Llama3Rope():
            return max_position_embeddings
        case LinearRope() | DynamicRope():
            return int(max_position_embeddings * rope.factor)
        case YarnRope():
            return int(rope.original_max * rope.factor)


def read_rope(config: ConfigFile, *, default_theta: float, max_position_embeddings: int) -> RopeSpec:
    """Read the rotary embedding. Raises `CheckpointError` for a kind that is not supported."""
    fields = _merged_fields(config)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    theta = config.positive("rope_theta", fields.get("rope_theta", default_theta), above=1)
    original_max = int(
        config.positive(
            "original_max_position_embeddings",
            fields.get("original_max_position_embeddings", max_position_embeddings),
            above=0.999,
            maximum=MAX_POSITIONS,
        )
    )
    rope: RopeSpec
    match kind:
        case "default":
            rope = DefaultRope(theta)
        case "linear":
            rope = LinearRope(theta, _factor(config, "factor", fields.get("factor")))
        case "dynamic":
            rope = DynamicRope(theta, _factor(config, "factor", fields.get("factor")), max_position_embeddings)
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            factor, low, high = (_factor(config, name, fields.get(name)) for name in names)
            if low >= high:
                config.fail(f"`high_freq_factor` must be above `low_freq_factor` {low:g}, but it is {high:g}")
            rope = Llama3Rope(theta, factor, low, high, original_max)
        case "yarn":
            rope = _read_yarn(config, fields, theta, original_max, max_position_embeddings)
        case _:
            config.fail(f"the rope type {shown(kind)} is not supported; supported are {SUPPORTED}")
    return rope


def check_head_dim(config: ConfigFile, rope: RopeSpec, head_dim: int) -> None:
    """Raise `CheckpointError` if the rotated part of a head is too small for its rope."""
    if isinstance(rope, DynamicRope) and head_dim < 4:
        config.fail(f"the rope type dynamic needs heads of at least 4 features, but they have {head_dim}")


def softmax_factor(config: ConfigFile, rope: RopeSpec) -> float:
    """Return the factor of a DeepSeek model's attention scores where positions are scaled: YaRN's factor, squared for
    queries and keys, with `mscale_all_dim`. The rotated parts get theirs by `YarnRope.attention_factor`."""
    scale = _merged_fields(config).get("mscale_all_dim")
    if isinstance(rope, DefaultRope) or not scale:
        return 1.0
    return _recommended_factor(rope.factor, _factor(config, "mscale_all_dim", scale)) ** 2


def _merged_fields(config: ConfigFile) -> dict[str, Any]:
    """Return the rope's fields, wherever this style of config.json has them, without null ones."""
    nested = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(nested, dict):
        config.fail(f"`rope_scaling` must be an object, but it is {shown(nested)}")
    if any(isinstance(value, dict) for value in nested.values()):
        config.fail("`rope_parameters` differ between kinds of layers, which is not supported")
    fields = {name: value for name, value in nested.items() if value is not None}
    if config.get("rope_theta") is not None:
        fields.setdefault("rope_theta", config.get("rope_theta"))
    if config.get("original_max_position_embeddings") is not None:
        fields["original_max_position_embeddings"] = config.get("original_max_position_embeddings")
    partial = fields.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        config.fail(
            f"`partial_rotary_factor` is {shown(partial)}; only models that rotate the whole head are supported"
        )
    return fields


def _read_yarn(
    config: ConfigFile, fields: dict[str, Any], theta: float, original_max: int, max_position_embeddings: int
) -> YarnRope:
    factor = _factor(config, "factor", fields.get("factor", max_position_embeddings / original_max))
    truncate = fields.get("truncate", True)
    if not isinstance(truncate, bool):
        config.fail(f"`truncate` must be true or false, but it is {shown(truncate)}")
    return YarnRope(
        theta=theta,
        factor=factor,
        original_max=original_max,
        attention_factor=_attention_factor(config, fields, factor),
        beta_fast=_factor(config, "beta_fast", fields.get("beta_fast", 32)),
        beta_slow=_factor(config, "beta_slow", fields.get("beta_slow", 1)),
        truncate=truncate,
    )


def _attention_factor(config: ConfigFile, fields: dict[str, Any], factor: float) -> float:
    """Return the given factor, or the one that the paper recommends. `mscale` and `mscale_all_dim` change the
    recommendation if both are set."""
    if "attention_factor" in fields:
        return _factor(config, "attention_factor", fields["attention_factor"])
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        mscale = _factor(config, "mscale", fields["mscale"])
        mscale_all_dim = _factor(config, "mscale_all_dim", fields["mscale_all_dim"])
        return _recommended_factor(factor, mscale) / _recommended_factor(factor, mscale_all_dim)
    return _recommended_factor(factor, 1.0)


def _factor(config: ConfigFile, name: str, value: Any) -> float:
    return config.positive(name, value, above=1 / MAX_FACTOR, maximum=MAX_FACTOR)


def _recommended_factor(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
