"""Weights in the form in which a model has packed them, sent from a worker to the same rank of another engine.

One thread of the sending worker serves one receiver over TCP, while steps go on: it only reads. The receiver shows a
key, and gets a header, the bytes, and a last byte that says whether the weights were the same all the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
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
"""Last byte, if the weights did not change while they were sent."""


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

    def header(self, number: int) -> StorageHeader:
        tensors = self.tensors()
        return StorageHeader(self._fingerprint(tensors), number, sum(map(len, tensors)))

    def _fingerprint(self, tensors: Sequence[Tensor]) -> str:
        machine = (torch.__version__, torch.backends.cpu.get_cpu_capability())
        content = repr((*self.facts, *machine, [len(part) for part in tensors]))
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def serve_storage(
    storage: Sequence[Tensor], header: StorageHeader, *, host: str, timeout: float, is_unchanged: Callable[[], bool]
) -> bytes:
    """Serve the weights once, to whoever shows the key within `timeout` seconds. Returns the encoded handle.
    `is_unchanged` is called at the end, in the thread."""
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    key = secrets.token_bytes(KEY_BYTES)
    listening.settimeout(timeout)

    def serve() -> None:
        with listening:
            try:
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(timeout)
                    _send(connection, key, storage, header, is_unchanged)
            except (OSError, TransferBroken) as error:
                logger.warning("weights were not sent to another engine: %s", error)

    threading.Thread(target=serve, name="weights-serve", daemon=True).start()
    return msgspec.msgpack.encode(StorageHandle(host, listening.getsockname()[1], key))


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
                _receive_into(connection, piece)
        if _receive(connection, 1) != UNCHANGED:
            raise TransferBroken("the other engine changed its weights while it sent them")

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferBroken("fetching the weights of another engine was broken off")


def _send(
    connection: socket.socket,
    key: bytes,
    storage: Sequence[Tensor],
    header: StorageHeader,
    is_unchanged: Callable[[], bool],
) -> None:
    if not hmac.compare_digest(_receive(connection, KEY_BYTES), key):
        raise TransferBroken("another process than the awaited worker connected")
    encoded = msgspec.msgpack.encode(header)
    connection.sendall(len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
    for piece in _pieces(storage):
        connection.sendall(piece)
    connection.sendall(UNCHANGED if is_unchanged() else b"\x00")


def _pieces(storage: Sequence[Tensor]) -> Iterator[memoryview]:
    for part in storage:
        for piece in part.split(PIECE_BYTES):
            yield piece.cpu().numpy().data


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
