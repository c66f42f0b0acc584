"""Linear layers of a checkpoint, several that take the same input merged into one product."""

from __future__ import annotations

from collections.abc import Sequence

from eagleray.models.kernels.reference import Kernels, LinearKernel
from eagleray.models.weights import Weights

__all__ = ["load_linear"]


def load_linear(
    weights: Weights,
    kernels: Kernels,
    names: Sequence[str],
    out_features: Sequence[int],
    in_features: int,
    *,
    bias: bool = False,
) -> LinearKernel:
    """The layers `names`, each with its number of outputs, one after another in the output."""
    shapes = [(size, in_features) for size in out_features]
    weight = weights.take_rows([f"{name}.weight" for name in names], shapes)
    if not bias:
        return kernels.linear(weight, None)
    return kernels.linear(weight, weights.take_rows([f"{name}.bias" for name in names], [(n,) for n in out_features]))
