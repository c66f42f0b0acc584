"""Linear layers of a checkpoint, several that take the same input merged into one product.

A tensor-parallel rank has either some of a layer's outputs, or its products with some of the inputs; then the products
of all ranks are summed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eagleray.models.kernels.reference import Kernels, LinearKernel
from eagleray.models.weights import Cut, Weights
from eagleray.parallel import Group

__all__ = ["load_linear", "load_summed_linear"]


def load_linear(
    weights: Weights,
    kernels: Kernels,
    names: Sequence[str],
    out_features: Sequence[int],
    in_features: int,
    *,
    outputs: Sequence[range] | None = None,
    bias: bool = False,
) -> LinearKernel:
    """The layers `names`, each with its number of outputs, one after another in the output.

    `outputs`: of each layer the outputs that are wanted; all by default.
    """
    cuts = None if outputs is None else [Cut(0, span) for span in outputs]
    shapes = [(size, in_features) for size in out_features]
    weight = weights.take_rows([f"{name}.weight" for name in names], shapes, cuts)
    if not bias:
        return kernels.linear(weight, None)
    biases = [f"{name}.bias" for name in names]
    return kernels.linear(weight, weights.take_rows(biases, [(size,) for size in out_features], cuts))


def load_summed_linear(
    weights: Weights,
    kernels: Kernels,
    name: str,
    out_features: int,
    in_features: int,
    *,
    inputs: range,
    tp: Group,
    bias: bool = False,
) -> LinearKernel:
    """A layer that takes only `inputs` here, the rest on the other ranks of `tp`."""
    weight = weights.take(f"{name}.weight", (out_features, in_features), Cut(1, inputs))
    offset = weights.take(f"{name}.bias", (out_features,)) if bias else None
    product = kernels.linear(weight, offset if tp.rank == 0 else None)  # added once, not by every rank
    return product if tp.size == 1 else SummedLinear(product, tp)


class SummedLinear:
    def __init__(self, product: LinearKernel, tp: Group) -> None:
        self._product = product
        self._tp = tp

    def __call__(self, x: Tensor) -> Tensor:
        return self._tp.all_reduce(self._product(x))
