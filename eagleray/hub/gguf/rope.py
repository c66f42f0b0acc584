"""The scaling of the rotary embedding in a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from eagleray.hub.gguf.header import GgufHeader

FREQUENCY_FACTORS = "rope_freqs.weight"
"""Tensor of the numbers by which the frequencies of a head are divided."""
LLAMA3_FIELDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Fields that Llama 3.1 and its successors have in common. Files have the numbers that they result in alone."""


def rope_scaling(header: GgufHeader, theta: float) -> dict[str, Any] | None:
    """Return the field `rope_scaling` of config.json. Raises `CheckpointError` for a scaling that is not supported."""
    if FREQUENCY_FACTORS in header.tensors:
        return _llama3(header, theta)
    kind = header.of_model("rope.scaling.type", "none")
    factor = header.of_model("rope.scaling.factor", header.of_model("rope.scale_linear"))
    if kind == "none" or not factor:
        return None
    if header.of_model("rope.scaling.attn_factor", 1.0) != 1.0:
        header.fail("a rotary embedding with `rope.scaling.attn_factor` is not supported")
    if kind not in ("linear", "yarn"):
        header.fail(f"the rope scaling {kind!r} is not supported; supported are linear, yarn and that of Llama 3")
    original = {"original_max_position_embeddings": header.of_model("rope.scaling.original_context_length")}
    return {"rope_type": kind, "factor": factor, **(original if kind == "yarn" else {})}


def _llama3(header: GgufHeader, theta: float) -> dict[str, Any] | None:
    tensor = header.tensors[FREQUENCY_FACTORS]
    if tensor.kind != "F32" or len(tensor.shape) != 1:
        header.fail(
            f"tensor {FREQUENCY_FACTORS!r} must be a vector of F32, but it is {tensor.kind} {list(tensor.shape)}"
        )
    stored = header.map_tensor(FREQUENCY_FACTORS).view("<f4")
    factor = float(stored.max())
    if factor == 1.0 == float(stored.min()):
        return None
    if not np.allclose(stored, llama3_factors(theta, factor, len(stored)), rtol=1e-3):
        header.fail(f"the numbers of {FREQUENCY_FACTORS!r} are not those of Llama 3, and others are not supported")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_FIELDS}


def llama3_factors(theta: float, factor: float, count: int) -> npt.NDArray[np.float32]:
    """Return the numbers by which the frequencies of Llama 3 are divided: 1 for short waves, `factor` for long ones,
    and for those between a blend of the frequencies."""
    low, high, original = LLAMA3_FIELDS.values()
    waves = 2 * math.pi * theta ** (np.arange(count) / count)
    blend = np.clip((original / waves - low) / (high - low), 0, 1)
    factors: npt.NDArray[np.float32] = (1 / ((1 - blend) / factor + blend)).astype(np.float32)
    return factors
