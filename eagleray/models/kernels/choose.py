"""Which kernels a device computes with."""

from __future__ import annotations

import torch

from eagleray.log import get_logger
from eagleray.models.kernels.build import NativeUnavailable, native_library
from eagleray.models.kernels.native import MAX_HEAD_DIM, NativeKernels
from eagleray.models.kernels.packed import PackedKernels
from eagleray.models.kernels.reference import Kernels
from eagleray.models.spec import ModelSpec

__all__ = ["kernels_for"]

logger = get_logger(__name__)


def kernels_for(device: torch.device, dtype: torch.dtype, spec: ModelSpec) -> Kernels:
    """For a model of that shape and dtype."""
    if device.type != "cpu":
        return Kernels()
    if not NativeKernels.serves(dtype, spec):
        logger.warning(
            "computing with plain torch, which is slower: the kernels for this processor serve bfloat16 and float32, "
            "even sizes, and heads of up to %d features",
            MAX_HEAD_DIM,
        )
        return PackedKernels()
    try:
        return NativeKernels(native_library(), dtype, num_threads=torch.get_num_threads())
    except NativeUnavailable as error:
        logger.warning("computing with plain torch, which is slower: %s", error)
        return PackedKernels()
