"""Which kernels a device computes with."""

from __future__ import annotations

import torch

from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cpu.build.unavailable import NativeUnavailable
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.onednn import OneDnnBackend
from eagleray.log import get_logger
from eagleray.models.spec import ModelSpec

logger = get_logger(__name__)


def choose_backend(device: torch.device, dtype: torch.dtype, spec: ModelSpec) -> TorchBackend:
    """For a model of that shape and dtype."""
    if device.type != "cpu":
        return TorchBackend()
    if not CpuBackend.serves(dtype, spec):
        logger.warning(
            "computing with plain torch, which is slower: the kernels for this processor serve bfloat16 and float32, "
            "even sizes, and heads of up to %d features",
            abi.MAX_HEAD_DIM,
        )
        return OneDnnBackend()
    try:
        return CpuBackend(native_library(), dtype, num_threads=torch.get_num_threads())
    except NativeUnavailable as error:
        logger.warning("computing with plain torch, which is slower: %s", error)
        return OneDnnBackend()
