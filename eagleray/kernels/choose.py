"""The choice of a backend for a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cpu.build.openmp import NativeUnavailable
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.onednn import OneDnnBackend
from eagleray.log import get_logger

logger = get_logger(__name__)


def choose_backend(
    device: torch.device, dtype: torch.dtype, *, feature_sizes: Sequence[int], head_dim: int
) -> KernelBackend:
    """Return the fastest backend for a model of this dtype. `feature_sizes`: see `ModelSpec.feature_sizes`."""
    if device.type != "cpu":
        return TorchBackend()
    if not CpuBackend.serves(dtype, feature_sizes=feature_sizes, head_dim=head_dim):
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
