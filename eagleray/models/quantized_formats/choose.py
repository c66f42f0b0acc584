"""The choice of a checkpoint's format by the `quantization_config` of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagleray.config.json_files import shown
from eagleray.models.config_file import ConfigFile
from eagleray.models.quantized_formats.awq import read_awq
from eagleray.models.quantized_formats.compressed_tensors import METHOD, read_block, read_compressed_tensors
from eagleray.models.quantized_formats.gptq import read_gptq
from eagleray.models.quantized_formats.scaled import ScaledFormat
from eagleray.models.quantized_formats.scales import Sharing
from eagleray.models.quantized_formats.stored_format import StoredFormat


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """FP8 weights with a scale for each block, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3)."""

    block: tuple[int, int]
    """Rows and columns of a block."""


def read_fp8(config: ConfigFile) -> StoredFormat | Fp8Blocks:
    """Read a `quantization_config`. Raises `CheckpointError`."""
    has_blocks = config.get("weight_block_size") is not None
    schemes = ("dynamic",) if has_blocks else ("dynamic", "static")
    if (scheme := config.get("activation_scheme") or "dynamic") not in schemes:
        config.fail(f"`activation_scheme` {shown(scheme)} is not supported; supported is {' and '.join(schemes)}")
    return (
        Fp8Blocks(read_block(config, "weight_block_size"))
        if has_blocks
        else ScaledFormat(method="fp8", is_float=True, sharing=Sharing())
    )


METHODS: Mapping[str, Callable[[ConfigFile], StoredFormat | Fp8Blocks]] = {
    "fp8": read_fp8,
    "gptq": read_gptq,
    "awq": read_awq,
    METHOD: read_compressed_tensors,
}
"""The function that reads the description of each `quant_method`."""


def read_quantization(config: ConfigFile, methods: Sequence[str] = tuple(METHODS)) -> StoredFormat | Fp8Blocks | None:
    """Return the format of a checkpoint, or None if its weights are plain numbers, or if the family itself declares the
    tensors of its method. `methods`: the methods that the family supports. Raises `CheckpointError`."""
    fields = config.get("quantization_config")
    if fields is None:
        return None
    method: Any = fields.get("quant_method") if isinstance(fields, dict) else fields
    if method not in methods or not isinstance(fields, dict):
        config.fail(
            f"`quantization_config` says {shown(method)}; quantized checkpoints of this architecture are not "
            f"supported, but for {', '.join(methods)}; float32, float16 and bfloat16 weights are"
        )
    section = config.section("quantization_config")
    return METHODS[method](section) if section is not None and method in METHODS else None
