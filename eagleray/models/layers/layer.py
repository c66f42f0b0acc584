"""The base of all layers: a layer declares its tensors when it is made, and has operations once these are loaded.

A layer can be made on every rank, also on one that has no part of it, because declaring takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.storage import memory_of
from eagleray.models.weights import Alias, Param, Weights

Make = Callable[[Weights, KernelBackend], Any]
"""Loads the tensors of a `WeightGroup` and makes its operation of them."""


class WeightGroup:
    """Tensors that are packed into one operation, and that operation once they are loaded.

    `alternative`: the group in another form in which an update may bring it, with the same storage. `adaptable`: the
    weights of the layers whose outputs the operation concatenates, if these can have adapters.
    """

    def __init__(
        self,
        params: Sequence[Param],
        make: Make,
        *,
        alternative: WeightGroup | None = None,
        adaptable: Sequence[Param] = (),
    ) -> None:
        self.params = params
        self.adaptable = adaptable
        self.make = make
        self.alternative = alternative
        self.operation: Any = None

    def load(self, weights: Weights, kernels: KernelBackend) -> None:
        self.operation = self.make(weights, kernels)

    def places(self) -> list[list[Tensor]]:
        """Return the memory of each copy of the weights on this rank."""
        return [storage_of(self.operation)]

    def groups(self) -> Iterator[WeightGroup]:
        yield self

    def storage(self) -> Iterator[Tensor]:
        """Yield the memory of the loaded tensors, see `OwnsWeights`."""
        yield from storage_of(self.operation)

    def names(self) -> Iterator[str]:
        for param in self.params:
            yield param.name

    def aliases(self) -> Iterator[Alias]:
        return iter(())

    def __call__(self, *inputs: Any) -> Any:
        return self.operation(*inputs)


def storage_of(made: Any) -> list[Tensor]:
    """Return the memory of an operation's weights, of all operations of a tuple, or of a tensor that is kept as it is
    (see `OwnsWeights.storage`). Memory that operations share is listed once."""
    if isinstance(made, Tensor):
        return memory_of(made)
    parts = [part for each in (made if isinstance(made, tuple) else (made,)) for part in each.storage()]
    return list({(part.data_ptr(), part.nbytes): part for part in parts}.values())


class Layer:
    """A part of a model. Its attributes that are layers or weight groups belong to it."""

    def load(self, weights: Weights, kernels: KernelBackend) -> None:
        """Make the operations of all groups."""
        for child in self._children():
            child.load(weights, kernels)

    def groups(self) -> Iterator[WeightGroup]:
        """Yield the groups of tensors that this rank has."""
        for child in self._children():
            yield from child.groups()

    def storage(self) -> Iterator[Tensor]:
        """Yield the memory of all loaded tensors, see `OwnsWeights`."""
        for child in self._children():
            yield from child.storage()

    def names(self) -> Iterator[str]:
        """Yield the names of the tensors that any rank has."""
        for child in self._children():
            yield from child.names()

    def aliases(self) -> Iterator[Alias]:
        """Yield other names by which an update may bring tensors of this layer."""
        for child in self._children():
            yield from child.aliases()

    def _children(self) -> Iterator[Layer | WeightGroup]:
        return (child for child in vars(self).values() if isinstance(child, Layer | WeightGroup))
