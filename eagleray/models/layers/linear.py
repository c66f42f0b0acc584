"""Linear layers and norms. Linear layers with the same input are merged into one product.

A tensor-parallel rank has either some of a layer's outputs or its products with some of the inputs; in the second case
the products of all ranks are added up.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagleray.kernels.backend import HiddenStates, KernelBackend, OperationWithWeights
from eagleray.models.layers.layer import Layer, WeightGroup
from eagleray.models.layers.sequence_parallel import SequenceParallel
from eagleray.models.part import ModelPart
from eagleray.models.weights import Cut, Param, WeightRole, Weights
from eagleray.parallel.group import TensorParallelGroup


def norm(name: str, size: int, eps: float) -> WeightGroup:
    """Declare an RMS norm over `size` features."""
    weight = Param(f"{name}.weight", (size,))
    return WeightGroup([weight], lambda weights, kernels: kernels.norm(weights.load(weight), eps))


def linear(
    names: Sequence[str],
    out_features: Sequence[int],
    in_features: int,
    *,
    outputs: Sequence[range] | None = None,
    bias: bool = False,
    gated: bool = False,
    is_quantizable: bool = True,
    role: WeightRole = WeightRole.FEED_FORWARD,
) -> WeightGroup:
    """Declare the layers `names`, whose outputs, `out_features` of each, are concatenated.

    `outputs`: the wanted outputs of each layer, by default all. `gated`: the first of two layers is the gate of the
    second (see `KernelBackend.gated_linear`). `is_quantizable`: whether the weight may be a quantized one, and the
    layers may have adapters.
    """
    shards = [None] * len(names) if outputs is None else [Cut(0, span) for span in outputs]
    sized = list(zip(names, out_features, shards, strict=True))
    matrices = [Param(f"{name}.weight", (size, in_features), shard, role=role) for name, size, shard in sized]
    offsets = [Param(f"{name}.bias", (size,), shard) for name, size, shard in sized] if bias else []

    def make(weights: Weights, kernels: KernelBackend) -> OperationWithWeights:
        weight = weights.load_weight(matrices) if is_quantizable else weights.load_concatenated(matrices)
        offset = weights.load_concatenated(offsets) if bias else None
        return kernels.gated_linear(weight, offset) if gated else kernels.linear(weight, offset)

    return WeightGroup([*matrices, *offsets], make, adaptable=matrices if is_quantizable else ())


def partial_linear(
    name: str,
    out_features: int,
    in_features: int,
    *,
    inputs: range,
    tp: TensorParallelGroup,
    bias: bool = False,
    role: WeightRole = WeightRole.FEED_FORWARD,
) -> WeightGroup:
    """Declare the part of a layer that takes `inputs`. The other ranks of `tp` have the other inputs, and the caller
    adds up the outputs of all ranks."""
    matrix = Param(f"{name}.weight", (out_features, in_features), Cut(1, inputs), role=role)
    offset = Param(f"{name}.bias", (out_features,))

    def make(weights: Weights, kernels: KernelBackend) -> OperationWithWeights:
        weight = weights.load_weight([matrix])
        loaded = weights.load(offset) if bias else None
        return kernels.linear(weight, loaded if tp.rank == 0 else None)  # added once, not by every rank

    return WeightGroup([matrix, offset] if bias else [matrix], make, adaptable=[matrix])


class SummedLinear(Layer):
    """A `partial_linear` that is followed by the sum over the ranks; with `sequence_parallel`, by the sum of only this
    rank's tokens."""

    def __init__(
        self,
        name: str,
        out_features: int,
        in_features: int,
        part: ModelPart,
        *,
        inputs: range,
        bias: bool = False,
        sequence_parallel: SequenceParallel | None = None,
        role: WeightRole = WeightRole.FEED_FORWARD,
    ) -> None:
        self._product = partial_linear(name, out_features, in_features, inputs=inputs, tp=part.tp, bias=bias, role=role)
        self._sequence_parallel = sequence_parallel
        self._part = part

    def __call__(self, x: HiddenStates) -> HiddenStates:
        product = self._product(x)
        if self._sequence_parallel is not None:
            return self._sequence_parallel.reduce_scatter(product)
        return product if self._part.tp.size == 1 else self._part.kernels.all_reduce(product, self._part.tp)
