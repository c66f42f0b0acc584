"""The description of compressed-tensors checkpoints in config.json: one scheme for all modules that are quantized.

Which modules these are, the checkpoint's tensors say themselves, so `targets` and `ignore` are not needed.
"""

from __future__ import annotations

from typing import Any, get_args

from eagleray.config.json_files import shown
from eagleray.models.config_file import ConfigFile
from eagleray.models.quantized_formats.pack_quantized import PackQuantizedFormat
from eagleray.models.quantized_formats.scaled import ScaledFormat
from eagleray.models.quantized_formats.scales import Sharing, Strategy
from eagleray.models.quantized_formats.stored_format import StoredFormat

METHOD = "compressed-tensors"
STORAGES = ("pack-quantized", "int-quantized", "float-quantized")
UNSUPPORTED = ("transform_config", "moe_sparsity_config")
"""Fields that change what the weights mean. `kv_cache_scheme` does not: option `kv_cache_dtype` chooses the cache."""


def read_compressed_tensors(config: ConfigFile) -> StoredFormat:
    """Read a `quantization_config`. Raises `CheckpointError`."""
    for name in UNSUPPORTED:
        if config.get(name):
            config.fail(f"`{name}` is not supported; supported are checkpoints with quantized weights without it")
    sparsity = config.section("sparsity_config")
    if sparsity is not None and sparsity.get("format") not in (None, "dense"):
        sparsity.fail(f"`format` {shown(sparsity.get('format'))} is not supported; supported is dense")
    scheme = _only_scheme(config)
    storage = scheme.get("format") or config.get("format")
    if storage not in STORAGES:
        config.fail(f"`format` {shown(storage)} is not supported; supported are {', '.join(STORAGES)}")
    weights, inputs = scheme.section("weights"), scheme.section("input_activations")
    if weights is None or scheme.get("output_activations"):
        scheme.fail("describes no weights, or quantized outputs; supported are quantized weights and inputs")
    if inputs is not None and (not inputs.boolean("symmetric", True) or inputs.get("num_bits") != 8):
        inputs.fail("activations must be symmetric and of 8 bits; they are not quantized here")
    return _format(str(storage), weights, has_quantized_inputs=inputs is not None)


def _only_scheme(config: ConfigFile) -> ConfigFile:
    """Return the scheme of all modules that are quantized."""
    groups = config.section("config_groups")
    if groups is None or not groups.fields:
        config.fail("`config_groups` is missing, which says how weights are quantized")
    schemes = [scheme for name in groups.fields if (scheme := groups.section(name)) is not None]
    if not schemes or any(_essence(scheme) != _essence(schemes[0]) for scheme in schemes):
        groups.fail("modules have different schemes, which is not supported; supported is one scheme for all")
    return schemes[0]


def _essence(scheme: ConfigFile) -> dict[str, Any]:
    return {name: value for name, value in scheme.fields.items() if name != "targets"}


def _format(storage: str, weights: ConfigFile, *, has_quantized_inputs: bool) -> StoredFormat:
    bits, kind = weights.integer("num_bits", 8), weights.get("type") or "int"
    is_packed, is_float = storage == "pack-quantized", storage == "float-quantized"
    if bits not in ((4, 8) if is_packed else (8,)) or kind != ("float" if is_float else "int"):
        weights.fail(
            f"`num_bits` {bits} of `type` {shown(kind)} is not supported in {storage}; supported are int of 4 and 8 "
            "bits in pack-quantized, int of 8 bits in int-quantized and float of 8 bits in float-quantized"
        )
    sharing, is_symmetric = _sharing(weights), weights.boolean("symmetric", True)
    if is_float and not is_symmetric:
        weights.fail("`symmetric` is false, which is not supported for FP8")
    if not is_packed:
        return ScaledFormat(
            method=METHOD,
            is_float=is_float,
            sharing=sharing,
            is_symmetric=is_symmetric,
            has_quantized_inputs=has_quantized_inputs,
        )
    if has_quantized_inputs:
        weights.fail("activations of 8 bits with packed weights are not supported; supported are W4A16 and W8A16")
    return PackQuantizedFormat(bits=bits, sharing=sharing, is_symmetric=is_symmetric)


def _sharing(weights: ConfigFile) -> Sharing:
    size = weights.get("group_size")
    strategy: Any = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in get_args(Strategy):
        weights.fail(f"`strategy` {shown(strategy)} is not supported; supported are tensor, channel, group and block")
    match strategy:
        case "group":
            return Sharing(strategy="group", group_size=weights.integer("group_size", None))
        case "block":
            return Sharing(strategy="block", block=read_block(weights, "block_structure"))
        case _:
            return Sharing(strategy=strategy)


def read_block(config: ConfigFile, name: str) -> tuple[int, int]:
    """Return the rows and columns that share a scale."""
    block = config.get(name)
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        config.fail(f"`{name}` must be two sizes, [rows, columns], but it is {shown(block)}")
    return block[0], block[1]
