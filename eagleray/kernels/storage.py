"""Access to the memory of weights, see `OwnsWeights`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor, or a copy of it, in contiguous memory."""
    return None if tensor is None else tensor.contiguous()


def memory_of(*tensors: Tensor | None) -> list[Tensor]:
    """Return the memory of tensors, which must be contiguous: one-dimensional uint8 tensors."""
    return [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor is not None]


class FunctionWithWeights:
    """An operation that is computed by a function. `memory`: the weights that the function reads."""

    def __init__(self, function: Callable[..., Any], memory: list[Tensor]) -> None:
        self._function = function
        self._memory = memory

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def storage(self) -> list[Tensor]:
        return [*self._memory]
