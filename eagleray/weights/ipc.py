"""Backend `ipc`: tensors in the memory of GPUs, which the trainer's process shares with workers on the same GPUs.

A handle is `(rebuild_cuda_tensor, arguments)`, see `messages.torch_values`. The number of the device is replaced by the
worker's own, because each process may see other devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from eagleray.errors import ConfigError, NotFound, WeightsMismatch
from eagleray.messages.torch_values import CudaTensorHandle
from eagleray.weights.receiver import CheckTensors, NamedTensors, ReceiverPosition
from eagleray.weights.tensors import MAPPED_BUCKET_BYTES, SentTensor, into_buckets, read_update_info, unpack_bucket

DEVICE = 6
"""Index of the argument that is the number of the device."""


def open_receiver(init_info: Mapping[str, Any], position: ReceiverPosition, timeout: float) -> IpcReceiver:
    """Make the receiver of a worker, see `receiver.open_receiver`. Raises `ConfigError` on a CPU."""
    if position.device.type != "cuda":
        raise ConfigError(
            "backend ipc shares the memory of GPUs, but the workers compute on the CPU: send by shm instead"
        )
    return IpcReceiver(position.device, is_packed=bool(init_info.get("packed", False)))


class IpcReceiver:
    """See `receiver.WeightReceiver`. The tensors are mapped while they are received, and copied by the consumer."""

    def __init__(self, device: torch.device, *, is_packed: bool) -> None:
        self._device = device
        self._is_packed = is_packed
        uuid = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else ""
        self._uuid = bare_uuid(str(uuid))

    def connect(self) -> None:
        """Do nothing: memory is mapped when tensors are received."""

    def receive(self, update_info: Mapping[str, Any], check: CheckTensors) -> Iterator[NamedTensors]:
        tensors = read_update_info(update_info)
        if "ipc_handles" not in update_info:
            raise WeightsMismatch(
                "update_info of backend ipc has no `ipc_handles`. Pickled ones are not read: send `ipc_handles` from "
                "Python, or use backend nccl or shm over HTTP"
            )
        is_packed = "tensor_sizes" in update_info or bool(update_info.get("packed", self._is_packed))
        handles = find_handles(update_info["ipc_handles"], self._uuid, 1 if is_packed else len(tensors))
        check(tensors)
        if is_packed:
            buffer = self._map(handles[0]).view(-1).view(torch.uint8)
            check_sizes(tensors, update_info.get("tensor_sizes"), len(buffer))
            yield list(unpack_bucket(buffer, tensors))
            return
        remaining = iter(handles)
        for bucket in into_buckets(tensors, MAPPED_BUCKET_BYTES):
            yield [(tensor.name, self._map_as(tensor, next(remaining))) for tensor in bucket]

    def close(self) -> None:
        """Do nothing: memory is unmapped when its tensors are no longer used."""

    def _map_as(self, tensor: SentTensor, handle: CudaTensorHandle) -> Tensor:
        mapped = self._map(handle)
        if (mapped.dtype, tuple(mapped.shape)) != (tensor.dtype, tensor.shape):
            raise WeightsMismatch(
                f"{tensor.name}: the handle has {mapped.dtype} {list(mapped.shape)}, but update_info says "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
        return mapped

    def _map(self, handle: CudaTensorHandle) -> Tensor:
        rebuild, arguments = handle.to_torch()
        mapped: Tensor = rebuild(*arguments[:DEVICE], self._device.index or 0, *arguments[DEVICE + 1 :])
        return mapped


def bare_uuid(uuid: str) -> str:
    """Return the id of a GPU without the prefix that some libraries give it."""
    return uuid.removeprefix("GPU-").lower()


def find_handles(handles: Any, uuid: str, count: int) -> list[CudaTensorHandle]:
    """Return the `count` handles for the GPU `uuid`, from a list of dicts by GPU, or one such dict. Raises
    `WeightsMismatch`, or `NotFound` if there is none for the GPU."""
    by_gpu = [handles] if isinstance(handles, Mapping) else handles
    if not isinstance(by_gpu, list | tuple) or len(by_gpu) != count:
        raise WeightsMismatch(f"update_info: `ipc_handles` must be a list of {count} dicts of handles by GPU uuid")
    return [_handle_for(uuid, one) for one in by_gpu]


def check_sizes(tensors: list[SentTensor], sizes: Any, buffer_bytes: int) -> None:
    """Raise `WeightsMismatch` unless `sizes` are those of the tensors, and all fit into the buffer."""
    expected = [tensor.num_bytes for tensor in tensors]
    if sizes is not None and list(sizes) != expected:
        raise WeightsMismatch("update_info: `tensor_sizes` are not the bytes of the tensors that `shapes` describe")
    if sum(expected) > buffer_bytes:
        raise WeightsMismatch(f"the tensors have {sum(expected)} bytes, but the shared buffer has {buffer_bytes}")


def _handle_for(uuid: str, by_gpu: Any) -> CudaTensorHandle:
    if not isinstance(by_gpu, Mapping):
        raise WeightsMismatch(f"update_info: an entry of `ipc_handles` is a {type(by_gpu).__name__}, not a dict by GPU")
    for gpu, handle in by_gpu.items():
        if bare_uuid(str(gpu)) == uuid:
            return _check_handle(handle)
    raise NotFound(
        f"`ipc_handles` has none for GPU {uuid}, this worker's: the trainer must share the memory of every GPU that "
        f"has a worker; there are handles for {', '.join(map(str, by_gpu)) or 'no GPU'}"
    )


def _check_handle(handle: Any) -> CudaTensorHandle:
    if isinstance(handle, CudaTensorHandle):
        return handle
    if not isinstance(handle, list | tuple) or len(handle) != 2:
        raise WeightsMismatch(
            "update_info: a handle is `(rebuild_cuda_tensor, arguments)`, as torch's reduce_tensor makes"
        )
    try:
        return CudaTensorHandle.of(handle[1])
    except ValueError as error:
        raise WeightsMismatch(f"update_info: a handle of CUDA memory is not as torch makes it: {error}") from None
