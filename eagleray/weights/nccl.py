"""Backend `nccl`: broadcasts between GPUs, by a communicator of NCCL that belongs to this transfer alone.

The trainer listens with a store and publishes NCCL's id in it, as vLLM's trainers do, or gives the id in `init_info`.
An addition of one number of each rank follows. Then each tensor is a broadcast, or each bucket if they are packed.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from eagleray.errors import ConfigError, DeadlineExceeded, InvalidRequest, TransferBroken
from eagleray.weights.gloo_group import reach_store
from eagleray.weights.nccl_library import UNIQUE_ID_BYTES, NcclCommunicator
from eagleray.weights.receiver import CheckTensors, NamedTensors, Positive, ReceiverPosition, check_rank, read_fields
from eagleray.weights.tensors import MAPPED_BUCKET_BYTES, bucket_bytes, into_buckets, read_update_info, unpack_bucket

ID_KEY = "broadcast_from/0/0"
"""Key of the store under which the trainer publishes NCCL's id."""
MAX_ID_PICKLE_BYTES = 1024
POLL_SECONDS = 0.001
"""Interval at which it is checked whether a bucket has arrived."""


class NcclInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`init_info` of a communicator."""

    world_size: int
    """Number of ranks, with the trainer."""
    master_address: str = ""
    master_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    nccl_unique_id_b64: str = ""
    """NCCL's id, in base64, if there is no store."""
    rank_offset: int = 1
    """Rank of the first worker of the instance."""
    packed: bool = False
    """Whether tensors come in buckets, as bytes, or each by a broadcast of its own."""
    packed_buffer_size_bytes: Positive = 2**30
    packed_num_buffers: Positive = 2
    """Number of the trainer's buffers. Receiving does not depend on it: each bucket has memory of its own."""


def open_receiver(init_info: Mapping[str, Any], position: ReceiverPosition, timeout: float) -> NcclReceiver:
    """Make the receiver of a worker, see `receiver.open_receiver`. Raises `ConfigError` on a CPU."""
    if position.device.type != "cuda":
        raise ConfigError(
            "backend nccl sends between GPUs, but the workers compute on the CPU: send by gloo, or by shm on one node"
        )
    info = read_fields("nccl", "init_info", init_info, NcclInfo)
    if not info.nccl_unique_id_b64 and not (info.master_address and info.master_port):
        raise InvalidRequest(
            "init_info of backend nccl: either `master_address` and `master_port` or `nccl_unique_id_b64` are needed",
            param="init_info",
        )
    rank = check_rank("nccl", info.rank_offset + position.rank, info.world_size)
    return NcclReceiver(info, rank=rank, device=position.device, timeout=timeout)


class NcclReceiver:
    """See `receiver.WeightReceiver`. Tensors are received into memory of the device."""

    def __init__(self, info: NcclInfo, *, rank: int, device: torch.device, timeout: float) -> None:
        self._info = info
        self._rank = rank
        self._device = device
        self._timeout = timeout
        self._communicator: NcclCommunicator | None = None
        self._is_closed = False

    def connect(self) -> None:
        unique_id = self._unique_id()
        self._communicator = communicator = self._join(unique_id)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):  # steps of the model run in another stream and do not wait for the trainer
            communicator.warm_up()
        self._wait(communicator, stream)
        if self._is_closed:
            self.close()

    def receive(self, update_info: Mapping[str, Any], check: CheckTensors) -> Iterator[NamedTensors]:
        communicator = self._communicator
        if communicator is None:
            raise TransferBroken("the group was closed; the trainer must open another")
        try:
            tensors = read_update_info(update_info)
            check(tensors)
            stream = torch.cuda.Stream(self._device)
            if bool(update_info.get("packed", self._info.packed)):
                buckets = into_buckets(tensors, self._info.packed_buffer_size_bytes)
                for bucket in buckets:
                    buffer = self._receive(communicator, stream, (bucket_bytes(bucket),), torch.uint8)
                    yield list(unpack_bucket(buffer, bucket))
            else:
                for bucket in into_buckets(tensors, MAPPED_BUCKET_BYTES):
                    yield [
                        (tensor.name, self._receive(communicator, stream, tensor.shape, tensor.dtype))
                        for tensor in bucket
                    ]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._is_closed = True
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def _join(self, unique_id: bytes) -> NcclCommunicator:
        return NcclCommunicator(
            unique_id,
            rank=self._rank,
            size=self._info.world_size,
            device=self._device,
            timeout=self._timeout,
            is_cancelled=lambda: self._is_closed,
        )

    def _receive(
        self, communicator: NcclCommunicator, stream: torch.cuda.Stream, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Receive a tensor beside the steps of the model, which run in another stream."""
        with torch.cuda.stream(stream):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            communicator.broadcast(tensor)
        self._wait(communicator, stream)
        tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def _wait(self, communicator: NcclCommunicator, stream: torch.cuda.Stream) -> None:
        """Wait until the stream is done. Raises `TransferBroken` if NCCL reports a failure, the receiver is closed or
        the time limit is reached."""
        deadline = time.monotonic() + self._timeout
        while not stream.query():
            if self._is_closed:
                raise TransferBroken("the group was closed while a tensor was received")
            communicator.check()
            if time.monotonic() >= deadline:
                raise TransferBroken(f"the trainer took longer than {self._timeout:g} s for one broadcast")
            time.sleep(POLL_SECONDS)

    def _unique_id(self) -> bytes:
        info = self._info
        if info.nccl_unique_id_b64:
            try:
                unique_id = base64.b64decode(info.nccl_unique_id_b64, validate=True)
            except binascii.Error as error:
                raise InvalidRequest(f"`nccl_unique_id_b64` is no base64: {error}", param="init_info") from None
            return check_id(unique_id)
        store, _ = reach_store(
            info.master_address,
            info.master_port,
            world_size=info.world_size,
            timeout=self._timeout,
            is_cancelled=lambda: self._is_closed,
        )
        try:
            store.wait([ID_KEY], timedelta(seconds=self._timeout))
            return read_pickled_id(store.get(ID_KEY))
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"the trainer has published no id of NCCL within {self._timeout:g} s: {error}"
            ) from error


def check_id(unique_id: bytes) -> bytes:
    """Return the id. Raises `InvalidRequest` if it has another length than NCCL's ids."""
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise InvalidRequest(f"NCCL's id has {len(unique_id)} bytes, but {UNIQUE_ID_BYTES} are expected")
    return unique_id


def read_pickled_id(pickled: bytes) -> bytes:
    """Return the id in a pickled ctypes struct, and run nothing else that the pickle names. Raises
    `InvalidRequest`."""
    if len(pickled) > MAX_ID_PICKLE_BYTES:
        raise InvalidRequest(f"the trainer published {len(pickled)} bytes as NCCL's id")
    try:
        found = _IdUnpickler(io.BytesIO(pickled)).load()
    except Exception as error:  # damaged pickles raise errors of any kind
        raise InvalidRequest(f"the trainer published something else than NCCL's id: {error}") from None
    if not isinstance(found, bytes):
        raise InvalidRequest(f"the trainer published a {type(found).__name__} as NCCL's id")
    return check_id(found)


class _IdUnpickler(pickle.Unpickler):
    """Reads a struct of the name `ncclUniqueId` as its bytes, and refuses every other type and function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            return _struct_bytes
        if name.endswith("ncclUniqueId") or name == "UniqueId":
            return UniqueIdName
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an id of NCCL")


class UniqueIdName:
    """Stands for the trainer's type of the id in a pickle."""


def _struct_bytes(kind: Any, state: Any) -> bytes:
    """Return the bytes of a pickled ctypes struct, whose state is its attributes and its bytes."""
    if kind is not UniqueIdName or not (isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], bytes)):
        raise pickle.UnpicklingError("the struct is not of the type of NCCL's id")
    return state[1]
