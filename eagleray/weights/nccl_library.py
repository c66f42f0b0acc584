"""The functions of NCCL's library that a communicator with a trainer needs, called as its header declares them.

torch makes groups of its own over NCCL, but none with a given id, which a trainer has published.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor

from eagleray.errors import ConfigError, DeadlineExceeded, TransferBroken

LIBRARY = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
CONNECT_POLL_SECONDS = 0.05
"""Time of one wait for the other ranks, after which it is checked whether the transfer was closed."""
SUCCESS = 0
SUM = 0
DATA_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""Numbers of the enumeration ncclDataType_t."""


class UniqueId(ctypes.Structure):
    """The id of a communicator, `ncclUniqueId`, which is passed by value."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class NcclCommunicator:
    """A communicator of one rank. Operations are put into the current stream of the device."""

    def __init__(
        self,
        unique_id: bytes,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        is_cancelled: Callable[[], bool],
    ) -> None:
        """Connect. Returns when all ranks are connected.

        Raises `DeadlineExceeded` if they are not within `timeout` seconds, and `TransferBroken` if NCCL fails or
        `is_cancelled` returns True meanwhile.
        """
        self._library = library = _load()
        self._device = device

        def connect() -> ctypes.c_void_p:
            communicator = ctypes.c_void_p()
            with torch.cuda.device(device):
                result = library.ncclCommInitRank(
                    ctypes.byref(communicator), size, UniqueId.from_buffer_copy(unique_id), rank
                )
            self._check("ncclCommInitRank", result)
            return communicator

        self._communicator = _run_until(
            connect,
            what=f"the {size} ranks of the trainer's communicator of NCCL",
            timeout=timeout,
            is_cancelled=is_cancelled,
            drop=library.ncclCommAbort,
        )

    def warm_up(self) -> None:
        """Add up one number of each rank, as the trainer does after it has connected."""
        with torch.cuda.device(self._device):
            one = torch.zeros(1, device=self._device)
            stream = torch.cuda.current_stream(self._device)
            address = ctypes.c_void_p(one.data_ptr())
            result = self._library.ncclAllReduce(
                address,
                address,
                ctypes.c_size_t(1),
                DATA_TYPES[torch.float32],
                SUM,
                self._communicator,
                ctypes.c_void_p(stream.cuda_stream),
            )
            self._check("ncclAllReduce", result)

    def broadcast(self, tensor: Tensor) -> None:
        """Receive a contiguous tensor from rank 0, in the current stream."""
        kind = DATA_TYPES.get(tensor.dtype)
        count = tensor.numel()
        if kind is None:  # of a dtype that older versions of NCCL lack
            kind, count = DATA_TYPES[torch.uint8], tensor.nbytes
        address = ctypes.c_void_p(tensor.data_ptr())
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            result = self._library.ncclBroadcast(
                address,
                address,
                ctypes.c_size_t(count),
                kind,
                0,
                self._communicator,
                ctypes.c_void_p(stream.cuda_stream),
            )
        self._check("ncclBroadcast", result)

    def check(self) -> None:
        """Raise `TransferBroken` if an operation has failed since it was begun."""
        error = ctypes.c_int(SUCCESS)
        self._check(
            "ncclCommGetAsyncError", self._library.ncclCommGetAsyncError(self._communicator, ctypes.byref(error))
        )
        self._check("an operation of NCCL", error.value)

    def abort(self) -> None:
        """Leave the communicator, from any thread. Operations that this rank has begun end; those of others fail or
        wait."""
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator:
            self._library.ncclCommAbort(communicator)

    def _check(self, what: str, result: int) -> None:
        if result != SUCCESS:
            text = self._library.ncclGetErrorString(result)
            raise TransferBroken(f"{what} failed: {text.decode(errors='replace') if text else result}")


def _run_until(
    connect: Callable[[], ctypes.c_void_p],
    *,
    what: str,
    timeout: float,
    is_cancelled: Callable[[], bool],
    drop: Callable[[ctypes.c_void_p], object],
) -> ctypes.c_void_p:
    """Return `connect()`, which runs in a thread because NCCL waits for the other ranks without a limit. One that ends
    after the wait for it was given up is passed to `drop`."""
    connected: Future[ctypes.c_void_p] = Future()

    def run() -> None:
        try:
            connected.set_result(connect())
        except Exception as error:
            connected.set_exception(error)

    def drop_late(late: Future[ctypes.c_void_p]) -> None:
        if late.exception() is None:
            drop(late.result())

    deadline = time.monotonic() + timeout
    threading.Thread(target=run, name="weights-nccl-connect", daemon=True).start()
    while not wait([connected], CONNECT_POLL_SECONDS).done:
        if is_cancelled() or time.monotonic() >= deadline:
            connected.add_done_callback(drop_late)
            if is_cancelled():
                raise TransferBroken(f"the transfer was closed while {what} connected")
            raise DeadlineExceeded(f"{what} were not connected within {timeout:g} s")
    return connected.result()


def _load() -> Any:
    """Return the library that torch has loaded already. Raises `ConfigError` if it cannot be found."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise ConfigError(f"backend nccl: {LIBRARY} cannot be loaded: {error}") from error
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int]
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(ctypes.c_int)]
    library.ncclCommAbort.argtypes = [pointer]
    library.ncclGetErrorString.argtypes = [number]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library
