"""Weights in the form in which a model has packed them, sent from a worker to the same rank of another engine.

One thread of the sending worker serves one receiver over TCP, while steps go on: it only reads. The receiver shows a
key, and gets a header and the weights in pieces; bytes between them say whether the weights are still the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from eagleray.errors import TransferBroken, WeightsMismatch
from eagleray.log import get_logger

logger = get_logger(__name__)

KEY_BYTES = 32
LENGTH_BYTES = 4
PIECE_BYTES = 16 * 2**20
"""Bytes that are copied at once between the host and a device."""
UNCHANGED = b"\x01"
"""Byte before each piece and after the last one, if the weights have not changed so far."""
CHANGED = b"\x00"


class StorageHandle(msgspec.Struct, frozen=True):
    """Data by which another worker reaches the server."""

    host: str
    port: int
    key: bytes


class StorageHeader(msgspec.Struct, frozen=True):
    layout: str
    """Fingerprint of the layout of the weights; bytes of another layout mean other weights."""
    update: int
    """Number of the update whose weights they are."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """Memory of a model's weights, for other engines. `facts` are those that its layout depends on."""

    tensors: Callable[[], list[Tensor]]
    facts: tuple[object, ...]
    host: str
    """Address of this machine that the workers of other engines can reach."""
    is_readable: Callable[[], bool] = lambda: True
    """Whether the memory contains the weights; not while it is released."""
    num_loads: Callable[[], int] = lambda: 0
    """Number of calls of the worker extension that have loaded weights, see `Model.num_loads`."""

    def header(self, number: int) -> StorageHeader:
        tensors = self.tensors()
        return StorageHeader(self._fingerprint(tensors), number, sum(map(len, tensors)))

    def _fingerprint(self, tensors: Sequence[Tensor]) -> str:
        machine = (torch.__version__, torch.backends.cpu.get_cpu_capability())
        content = repr((*self.facts, *machine, [len(part) for part in tensors]))
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


class StorageChanged(TransferBroken):
    """The weights of an offer are not what they were."""


class StorageOffer:
    """Serves the weights, which are those of update `number`, once, in a thread, to the first that shows the key within
    `timeout` seconds."""

    def __init__(self, storage: SharedStorage, number: int, *, host: str, timeout: float) -> None:
        self._tensors = storage.tensors()
        self._header = storage.header(number)
        self._count_loads = storage.num_loads
        self._num_loads = storage.num_loads()
        self._timeout = timeout
        self._key = secrets.token_bytes(KEY_BYTES)
        self._lock = threading.Lock()  # held while a device is read
        self._is_closed = False
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.settimeout(timeout)
        self.handle = msgspec.msgpack.encode(StorageHandle(host, listening.getsockname()[1], self._key))
        """Encoded `StorageHandle`."""
        self._thread = threading.Thread(target=self._serve, args=(listening,), name="weights-serve", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether weights are being sent, or the receiver is awaited."""
        return self._thread.is_alive() and not self._is_closed

    def close(self) -> None:
        """Stop reading the device, and have the receiver discard the weights. Must be called before the weights change
        or their memory is released."""
        with self._lock:
            self._is_closed = True

    def _serve(self, listening: socket.socket) -> None:
        with listening:
            try:
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(self._timeout)
                    try:
                        self._send(connection)
                    except StorageChanged:
                        connection.sendall(CHANGED)
                        raise
            except (OSError, TransferBroken) as error:
                logger.warning("weights were not sent to another engine: %s", error)

    def _send(self, connection: socket.socket) -> None:
        if not hmac.compare_digest(_receive(connection, KEY_BYTES), self._key):
            raise TransferBroken("another process than the awaited worker connected")
        encoded = msgspec.msgpack.encode(self._header)
        connection.sendall(len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
        for part in self._tensors:
            for piece in part.split(PIECE_BYTES):
                data = self._read(piece)
                connection.sendall(UNCHANGED)
                connection.sendall(data)
        self._check_open()
        connection.sendall(UNCHANGED)

    def _read(self, piece: Tensor) -> memoryview:
        with self._lock:
            self._check_open()
            return piece.cpu().numpy().data

    def _check_open(self) -> None:
        if self._is_closed or self._count_loads() != self._num_loads:
            raise StorageChanged("they were changed or put to sleep meanwhile")


class StorageFetch:
    """Overwrites `storage` with the weights that another worker serves. `header`: the layout and the number that they
    must have. `timeout` limits each wait, in seconds."""

    def __init__(
        self, packed_handle: bytes, storage: Sequence[Tensor], header: StorageHeader, *, timeout: float
    ) -> None:
        self._packed_handle = packed_handle
        self._storage = storage
        self._header = header
        self._timeout = timeout
        self._connection: socket.socket | None = None
        self._is_closed = False

    def run(self) -> int:
        """Fetch the weights, and return their bytes.

        Raises `WeightsMismatch` if they are others, and `TransferBroken` if they end too soon, or after `close`;
        `storage` is a mixture then.
        """
        handle = msgspec.msgpack.decode(self._packed_handle, type=StorageHandle)
        try:
            with socket.create_connection((handle.host, handle.port), timeout=self._timeout) as connection:
                self._connection = connection
                self._check_open()  # `close` has either seen the connection, or is seen here
                self._receive(connection, handle.key)
        except (OSError, msgspec.MsgspecError) as error:
            raise TransferBroken(
                f"the worker of another engine at {handle.host} did not send weights: {error}"
            ) from error
        self._check_open()
        return self._header.num_bytes

    def close(self) -> None:
        """Write nothing to `storage` any longer, but for the piece that is being written. From any thread."""
        self._is_closed = True
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._connection.shutdown(socket.SHUT_RDWR)

    def _receive(self, connection: socket.socket, key: bytes) -> None:
        connection.sendall(key)
        length = int.from_bytes(_receive(connection, LENGTH_BYTES), "big")
        offered = msgspec.msgpack.decode(_receive(connection, length), type=StorageHeader)
        if offered != self._header:
            raise WeightsMismatch(f"the other engine has weights of another layout or update: {offered}")
        for part in self._storage:
            for piece in part.split(PIECE_BYTES):
                self._check_open()
                _check_unchanged(connection)
                _receive_into(connection, piece)
        _check_unchanged(connection)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferBroken("fetching the weights of another engine was broken off")


def _check_unchanged(connection: socket.socket) -> None:
    if _receive(connection, 1) != UNCHANGED:
        raise TransferBroken("the other engine changed its weights while it sent them")


def _receive(connection: socket.socket, length: int) -> bytes:
    received = bytearray(length)
    _fill(connection, memoryview(received))
    return bytes(received)


def _receive_into(connection: socket.socket, piece: Tensor) -> None:
    host = piece if piece.device.type == "cpu" else torch.empty(len(piece), dtype=torch.uint8)
    _fill(connection, host.numpy().data)
    if host is not piece:
        piece.copy_(host)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        if (count := connection.recv_into(view)) == 0:
            raise TransferBroken("the connection between the workers was closed too soon")
        view = view[count:]
