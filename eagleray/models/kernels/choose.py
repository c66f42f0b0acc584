"""Which kernels a device computes with."""

from __future__ import annotations

import torch

from eagleray.models.kernels.cpu import CpuKernels
from eagleray.models.kernels.reference import Kernels

__all__ = ["kernels_for"]


def kernels_for(device: torch.device) -> Kernels:
    return CpuKernels() if device.type == "cpu" else Kernels()
