"""Root-mean-square normalization."""

from __future__ import annotations

from torch import Tensor

from eagleray.models.kernels.reference import Kernels

__all__ = ["RMSNorm"]


class RMSNorm:
    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        self._weight = weight
        self._eps = eps
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """Over the last dimension, same shape."""
        return self._kernels.rms_norm(x, self._weight, self._eps)
