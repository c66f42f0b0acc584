"""A guard against code that waits for a device. Tests on CPU tensors would not notice such code otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

READS: dict[Callable[..., Any], str] = {
    getattr(Tensor, name): name
    for name in (
        *("item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "unique", "masked_select", "bincount", "is_nonzero"),
        *("equal", "allclose", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
        *("__array__", "__repr__", "__format__"),
    )
} | {
    torch.nonzero: "torch.nonzero",
    torch.argwhere: "torch.argwhere",
    torch.unique: "torch.unique",
    torch.unique_consecutive: "torch.unique_consecutive",
    torch.masked_select: "torch.masked_select",
    torch.bincount: "torch.bincount",
    torch.equal: "torch.equal",
    torch.allclose: "torch.allclose",
    torch.tensor: "torch.tensor",
    torch.as_tensor: "torch.as_tensor",
}
"""Functions that wait for a device, because they return its numbers to the host, have results whose shapes depend on
these numbers, or copy from memory that is not pinned."""

INDEXED = (Tensor.__getitem__, Tensor.__setitem__)


class HostReadError(AssertionError):
    """The guarded code waits for the device."""


class _Guard(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = READS.get(func)
        if name is not None:
            raise HostReadError(f"{name} waits for the device")
        if func in INDEXED and _has_mask(args[1]):
            raise HostReadError("an index by a mask waits for the device")
        if func is torch.where and len(args) + len(kwargs or {}) == 1:
            raise HostReadError("torch.where of a mask alone waits for the device")
        return func(*args, **(kwargs or {}))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise `HostReadError` where the code in the block would wait for a device. Interpreted kernels are left alone:
    they run on the device."""
    with _Guard():
        yield
