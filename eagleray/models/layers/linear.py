"""Loaders of linear layers. Layers with the same input are merged into one product.

A tensor-parallel rank has either some of a layer's outputs or its products with some of the inputs; in the second case
the products of all ranks are added up.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagleray.kernels.backend import KernelBackend, Operation, OperationWithWeights
from eagleray.models.layers.sequence_parallel import SequenceParallel
from eagleray.models.weights import Cut, Weights
from eagleray.parallel.group import TensorParallelGroup


def load_linear(
    weights: Weights,
    kernels: KernelBackend,
    names: Sequence[str],
    out_features: Sequence[int],
    in_features: int,
    *,
    outputs: Sequence[range] | None = None,
    bias: bool = False,
    gated: bool = False,
    is_quantizable: bool = True,
) -> OperationWithWeights:
    """Load the layers `names`, whose outputs, `out_features` of each, are concatenated.

    `outputs`: the wanted outputs of each layer, by default all. `gated`: the first of two layers is the gate of the
    second (see `KernelBackend.gated_linear`). `is_quantizable`: whether the weight may be a quantized one.
    """
    cuts = None if outputs is None else [Cut(0, span) for span in outputs]
    shapes = [(size, in_features) for size in out_features]
    load_weight = weights.load_weight if is_quantizable else weights.load_concatenated
    weight = load_weight([f"{name}.weight" for name in names], shapes, cuts)
    offset = None
    if bias:
        offset = weights.load_concatenated([f"{name}.bias" for name in names], [(size,) for size in out_features], cuts)
    return kernels.gated_linear(weight, offset) if gated else kernels.linear(weight, offset)


def load_partial_linear(
    weights: Weights,
    kernels: KernelBackend,
    name: str,
    out_features: int,
    in_features: int,
    *,
    inputs: range,
    tp: TensorParallelGroup,
    bias: bool = False,
) -> Operation:
    """Load the part of a layer that takes `inputs`. The other ranks of `tp` have the other inputs, and the caller adds
    up the outputs of all ranks."""
    weight = weights.load_weight([f"{name}.weight"], [(out_features, in_features)], [Cut(1, inputs)])
    offset = weights.load(f"{name}.bias", (out_features,)) if bias else None
    return kernels.linear(weight, offset if tp.rank == 0 else None)  # added once, not by every rank


def load_summed_linear(
    weights: Weights,
    kernels: KernelBackend,
    name: str,
    out_features: int,
    in_features: int,
    *,
    inputs: range,
    tp: TensorParallelGroup,
    bias: bool = False,
    sequence_parallel: SequenceParallel | None = None,
) -> Operation:
    """Load a `load_partial_linear` that is followed by the sum over `tp`; with `sequence_parallel`, by the sum of only
    this rank's tokens."""
    product = load_partial_linear(weights, kernels, name, out_features, in_features, inputs=inputs, tp=tp, bias=bias)
    if tp.size == 1:
        return product
    if sequence_parallel is not None:
        return lambda x: sequence_parallel.reduce_scatter(product(x))
    return lambda x: kernels.all_reduce(product(x), tp)
