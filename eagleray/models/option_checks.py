"""Options that contradict config.json. Found without torch, so that a wrong one is an error before a process starts;
workers check the same again, because programs load models by themselves, too."""

from __future__ import annotations

from pathlib import Path

from eagleray.errors import ConfigError
from eagleray.models.config_file import MAX_LAYERS, ConfigFile

DRAFTS = {"DeepseekV3ForCausalLM": "deepseek_drafts"}
"""The module that makes the layer of a checkpoint which predicts further tokens, by architecture."""

DRAFT_LAYERS_FIELD = "num_nextn_predict_layers"

CHECKPOINT_METHODS = ("gptq", "awq", "compressed-tensors")
"""Values of `quantization` that only name the format of a checkpoint."""

INTEGERS = ("int8", "int4")

NUMBERS_WITHOUT_INTEGERS = ("float32", "float", "float16", "half")
"""Values of `dtype` that no kernel multiplies with integers."""


def check_num_stages(num_layers: int, num_stages: int) -> None:
    """Raise `ConfigError` if there are more pipeline stages than layers."""
    if num_stages > num_layers:
        raise ConfigError(
            f"option `pipeline_parallel_size`: {num_stages} stages are more than the model's {num_layers} layers; at "
            f"most {num_layers} fit"
        )


def check_method(path: Path, stored: str | None, quantization: str | None) -> None:
    """Raise `ConfigError` if `quantization` is another format than that of the checkpoint, whose config.json is at
    `path`. `stored`: its `quant_method`; None for plain weights."""
    if quantization is None or quantization == stored:
        return
    if stored is not None:
        raise ConfigError(
            f"option `quantization`: {quantization} is not the format of the checkpoint: {path} says that its weights "
            f"are stored as {stored}, which is kept; drop it or take {stored}"
        )
    if quantization in CHECKPOINT_METHODS:
        raise ConfigError(
            f"option `quantization`: {quantization} is a format of checkpoints, but {path} does not describe one; drop "
            "it, or take fp8, int8 or int4 to quantize the weights when they are loaded"
        )


def no_products(quantization: str, dtype: str, place: str = "") -> ConfigError:
    """Return the error for weights that the kernels for `dtype` cannot multiply; `place`: " on cpu", say."""
    return ConfigError(
        f"option `quantization`: the kernels for {dtype}{place} have no products with {quantization} weights; on CPUs "
        "with a C++ compiler bfloat16 has fp8, int4 and int8 (set `dtype`), on GPUs Triton's kernels have fp8"
    )


def no_draft_layer(path: Path, architecture: str) -> ConfigError:
    """Return the error for the method mtp and a checkpoint without a layer that predicts further tokens."""
    return ConfigError(
        "option `speculative_config`: the method mtp needs a layer of the checkpoint that predicts further tokens, but "
        f"the model that {path} describes ({architecture}) has none; take another method"
    )


def check_stated_quantization(config: ConfigFile, quantization: str | None, dtype: str) -> None:
    """Raise `ConfigError` if config.json and `dtype` rule out `quantization` on every device. Formats that only the
    reader of a family knows are left to it."""
    fields = config.get("quantization_config")
    if fields is None:
        check_method(config.path, None, quantization)
        if quantization in INTEGERS and dtype in NUMBERS_WITHOUT_INTEGERS:
            raise no_products(quantization, dtype)
    elif isinstance(fields, dict) and (method := fields.get("quant_method")) in ("fp8", *CHECKPOINT_METHODS):
        check_method(config.path, method, quantization)


def check_stated_draft_layer(config: ConfigFile) -> None:
    """Raise `ConfigError` if config.json describes no layer that predicts further tokens."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return  # the engine names an architecture that is not supported
    if names[0] not in DRAFTS or config.get(DRAFT_LAYERS_FIELD) == 0:
        raise no_draft_layer(config.path, names[0])


def check_stated_stages(config: ConfigFile, num_stages: int) -> None:
    """Raise `ConfigError` if there are more pipeline stages than the layers that config.json states."""
    count = config.get("num_hidden_layers")
    if isinstance(count, int) and not isinstance(count, bool) and 0 < count <= MAX_LAYERS:
        check_num_stages(count, num_stages)


def check_stated_cache(kv_cache_dtype: str, dtype: str) -> None:
    """Raise `ConfigError` if `dtype` rules out a cache of `kv_cache_dtype` on every device."""
    if kv_cache_dtype == "int8" and dtype in ("float16", "half"):
        raise ConfigError(
            f"option `kv_cache_dtype`: no kernel for {dtype} has a cache of int8; set `dtype` to bfloat16 or float32, "
            "or take auto"
        )
