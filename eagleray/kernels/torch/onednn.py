"""Products of weights that oneDNN has packed, for CPUs on which our own kernels are not available.

On two cores of a Zen 5, for one row a packed bfloat16 weight is read about twice as fast as a plain one, and products
of 16 and 32 rows are 1.4 to 1.7 times as fast. One layout serves every number of rows.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from eagleray.kernels.backend import OperationWithWeights
from eagleray.kernels.quantized import LoadedWeight, unquantized
from eagleray.kernels.storage import FunctionWithWeights, contiguous, memory_of
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.linear import PlainLinear


class OneDnnBackend(TorchBackend):
    """The torch backend with packed products. Everything else is inherited."""

    def __init__(self) -> None:
        candidates = (torch.float32, torch.bfloat16, torch.float16)
        self._packed_dtypes = frozenset(dtype for dtype in candidates if _can_pack(dtype))

    def linear(self, weight: LoadedWeight, bias: Tensor | None) -> OperationWithWeights:
        weight = unquantized(weight)
        if weight.dtype in self._packed_dtypes:
            return PackedLinear(weight, bias)
        if weight.dtype == torch.float16:
            # float32 holds every float16 exactly, and most CPUs have no float16 products
            wide = self.linear(weight.float(), None if bias is None else bias.float())
            return FunctionWithWeights(lambda x: wide(x.float()).half(), wide.storage())
        return PlainLinear(weight, bias)


class PackedLinear:
    """A product whose weight is in a layout that oneDNN chooses by its shape and dtype alone."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = contiguous(bias)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._memory = _packed_memory(self._packed)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._multiply(x, self._packed, self._bias, "none", [], "")
        return out

    def storage(self) -> list[Tensor]:
        return [self._memory, *memory_of(self._bias)]


def _packed_memory(packed: Tensor) -> Tensor:
    """Return the memory of a packed weight with its padding, uint8. Torch makes no views of such tensors, but returns
    their address and size."""
    size, address = torch.ops.mkldnn._nbytes(packed), torch.ops.mkldnn.data_ptr(packed)
    memory = (ctypes.c_uint8 * size).from_address(address)
    memory.owner = packed  # the tensor below refers to `memory` alone
    return torch.frombuffer(memory, dtype=torch.uint8)


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of `dtype` on this CPU. Only a trial shows it."""
    weight = torch.eye(16, dtype=dtype)
    try:
        return torch.equal(PackedLinear(weight, None)(weight), weight)
    except (AttributeError, RuntimeError):
        return False
