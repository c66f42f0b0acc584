"""Values of torch inside plain data (`messages.plain`): dtypes, sizes, tensors on the host, and handles of CUDA memory.

torch is not imported here: what is encoded is recognized by the name of its type, and torch is imported when a value is
decoded as torch's. A process without torch decodes a tensor as `TensorBytes` and a handle as `CudaTensorHandle`.

A handle is `(rebuild_cuda_tensor, arguments)`, as `torch.multiprocessing.reductions.reduce_tensor` returns it for a
tensor on a GPU. Only this function is known, by name; its 15 arguments are checked one by one, and nothing is
unpickled.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from eagleray.messages.arrays import Frame

REDUCTIONS = "torch.multiprocessing.reductions"
REBUILD = "rebuild_cuda_tensor"
TENSORS = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer")}
CLASSES = {
    "Tensor": ("torch", "Tensor"),
    "Parameter": ("torch.nn.parameter", "Parameter"),
    "UntypedStorage": ("torch.storage", "UntypedStorage"),
    "TypedStorage": ("torch.storage", "TypedStorage"),
}
"""Module and name of the classes that a handle may name. They are found by this table, never by a received name."""

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
HandleBytes = Annotated[bytes, Meta(max_length=1024)]


class CudaTensorHandle(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of `rebuild_cuda_tensor`, in its order."""

    tensor_class: Literal["Tensor", "Parameter"]
    size: tuple[Count, ...]
    stride: tuple[Count, ...]
    offset: Count
    """Position of the first element in the storage."""
    storage_class: Literal["UntypedStorage", "TypedStorage"]
    dtype: str
    device: Count
    """Number of the GPU in the sending process. The receiver replaces it by the number in its own process."""
    memory: HandleBytes | None
    """CUDA's handle of the allocation; None for an empty storage."""
    storage_bytes: Count
    storage_offset_bytes: Count
    """Position of the storage in the allocation."""
    requires_grad: bool
    ref_counter: HandleBytes | None
    ref_counter_offset: Count
    event: HandleBytes | None
    needs_event_sync: bool

    def __post_init__(self) -> None:
        if len(self.size) != len(self.stride):
            raise ValueError("the size and the stride differ in length")

    @classmethod
    def of(cls, arguments: Any) -> CudaTensorHandle:
        """Check the arguments of `rebuild_cuda_tensor`. Raises `ValueError` for those that it cannot have."""
        if not isinstance(arguments, list | tuple) or len(arguments) != len(cls.__struct_fields__):
            raise ValueError(f"`{REBUILD}` has {len(cls.__struct_fields__)} arguments")
        fields = list(arguments)
        fields[0], fields[4] = _class_name(fields[0]), _class_name(fields[4])
        fields[1:3] = [tuple(one) if isinstance(one, tuple) else one for one in fields[1:3]]
        fields[5] = dtype_name(fields[5]) if is_dtype(fields[5]) else None
        return msgspec.convert(fields, cls)

    def to_torch(self) -> tuple[Any, tuple[Any, ...]]:
        """Return the function of torch and its arguments. Raises `DecodeError` for a tensor that exceeds its
        storage."""
        torch = importlib.import_module("torch")
        dtype = find_dtype(self.dtype)
        if math.prod(self.size) > 0:
            last = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
            if (last + 1) * dtype.itemsize > self.storage_bytes:
                raise msgspec.DecodeError("a CUDA tensor is larger than its storage")
        fields: list[Any] = [getattr(self, name) for name in self.__struct_fields__]
        fields[0], fields[4] = _find_class(self.tensor_class), _find_class(self.storage_class)
        fields[1], fields[5] = torch.Size(self.size), dtype
        return getattr(importlib.import_module(REDUCTIONS), REBUILD), tuple(fields)


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor in a process without torch."""

    dtype: str
    """Its name in torch, such as `torch.bfloat16`."""
    shape: tuple[int, ...]
    data: bytes
    """The elements in C order."""


def is_dtype(value: Any) -> bool:
    return _type_of(value) == ("torch", "dtype")


def is_size(value: Any) -> bool:
    return _type_of(value) == ("torch", "Size")


def is_tensor(value: Any) -> bool:
    """Whether the value is a plain tensor: a subclass may need more than its elements to be rebuilt."""
    return _type_of(value) in TENSORS


def is_cuda_handle(value: tuple[Any, ...] | list[Any]) -> bool:
    """Whether the value is `(rebuild_cuda_tensor, arguments)`."""
    if len(value) != 2 or not callable(value[0]):
        return False
    return (getattr(value[0], "__module__", None), getattr(value[0], "__name__", None)) == (REDUCTIONS, REBUILD)


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype inside torch, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: str) -> Any:
    """Return torch's dtype. Raises `DecodeError` if there is none of this name."""
    torch = importlib.import_module("torch")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise msgspec.DecodeError(f"torch has no dtype `{name:.50}`")
    return dtype


def why_not_sent(tensor: Any) -> str | None:
    """Return why this tensor cannot be sent, or None if it can."""
    if tensor.device.type == "cuda":
        return "a tensor on a GPU: send `tensor.cpu()`, or `torch.multiprocessing.reductions.reduce_tensor(tensor)`"
    if tensor.device.type != "cpu":
        return f"a tensor on the device `{tensor.device.type}`: only elements on the host"
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized:
        return f"a {'quantized ' if tensor.is_quantized else ''}tensor of layout {tensor.layout}"
    return None


def tensor_bytes(tensor: Any) -> Frame:
    """Return the elements of a tensor on the host in C order. They are not copied if they are in that order."""
    torch = importlib.import_module("torch")
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # a tensor of one element may have any strides
    return memoryview(flat.view(torch.uint8).numpy())


def make_size(sizes: list[int]) -> Any:
    """Return a `torch.Size`."""
    return importlib.import_module("torch").Size(sizes)


def make_tensor(dtype: str, shape: list[int], data: memoryview) -> Any:
    """Return a tensor that owns a copy of `data`. Raises `DecodeError` if its size is wrong."""
    torch = importlib.import_module("torch")
    kind = find_dtype(dtype)
    if math.prod(shape) * kind.itemsize != len(data):
        raise msgspec.DecodeError(f"{len(data)} bytes are no tensor of {dtype} and shape {shape}")
    tensor = torch.empty(shape, dtype=kind)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return tensor


def _type_of(value: Any) -> tuple[str, str]:
    kind = type(value)
    return kind.__module__, kind.__qualname__


def _class_name(kind: Any) -> str | None:
    """Return the name of a class that a handle may name, or None for anything else."""
    if not isinstance(kind, type):
        return None
    return next((name for name, place in CLASSES.items() if place == (kind.__module__, kind.__qualname__)), None)


def _find_class(name: str) -> Any:
    module, attribute = CLASSES[name]
    return getattr(importlib.import_module(module), attribute)
