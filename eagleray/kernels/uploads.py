"""Copies of small arrays to a device, without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on `device`. On a CPU it shares the array's memory; to a GPU it is copied from
    pinned memory, after all work that was launched before, and the array may change at once."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
