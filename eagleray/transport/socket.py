"""An inbox per process, and an outbox that reaches the inboxes of others.

An inbox is a zmq PULL socket that its owner binds; an outbox holds one PUSH socket for each peer it was connected to.
Queues are unbounded in number: what flows here is small (token ids) and bounded by the requests that were admitted,
and a send that blocked would stop the engine for every client.

On one host an inbox is a Unix socket in the instance's directory, between hosts a TCP port with CURVE (see `tcp`). Its
address says which, and has all that is needed to connect: `ipc://PATH`, or `tcp://HOST:PORT?KEY`, which is secret.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq
import zmq.asyncio

from eagleray.errors import ChannelClosed
from eagleray.transport import tcp
from eagleray.transport.endpoint import local_address

__all__ = ["AsyncInbox", "Inbox", "Outbox"]

Frame = bytes | bytearray | memoryview
Message = TypeVar("Message")
Peer = TypeVar("Peer", bound=Hashable)

LINGER_MS = 1000
"""How long a closed outbox still tries to hand over what it took."""

OWNED_COPY_BYTES = 65536
"""zmq copies frames smaller than this on sending; larger ones it keeps alive and sends from where they are."""


class Inbox(Generic[Message]):
    """The inbox of a process that waits in a thread.

    Bound in `runtime_dir`, or to a free port of the address `host`, for peers of other hosts. Raises `ConfigError` if
    that is not an address of this host.
    """

    def __init__(
        self, runtime_dir: Path, name: str, decode: Callable[[list[Frame]], Message], host: str | None = None
    ) -> None:
        self._decode = decode
        self._socket, self.address = _open(zmq.Context.instance(), runtime_dir, name, host)

    def receive(self, timeout: float | None) -> Message | None:
        """The next message; None after `timeout` seconds without one (0 does not wait, None waits for ever).

        Raises `msgspec.ValidationError` for bytes that are no message of this wire.
        """
        try:
            if timeout is None or self._socket.poll(timeout * 1000):
                return self._decode(list(self._socket.recv_multipart()))
        except zmq.ZMQError as error:
            raise ChannelClosed(f"the inbox {tcp.without_key(self.address)} is closed: {error}") from error
        return None

    def close(self) -> None:
        """Unbind. What had arrived and was not received is dropped."""
        self._socket.close(linger=0)


class AsyncInbox(Generic[Message]):
    """The inbox of a process that waits in an event loop. Must be made inside that loop; arguments as `Inbox`."""

    def __init__(
        self, runtime_dir: Path, name: str, decode: Callable[[list[Frame]], Message], host: str | None = None
    ) -> None:
        self._decode = decode
        self._socket, self.address = _open(zmq.asyncio.Context.instance(), runtime_dir, name, host)

    async def receive(self) -> Message:
        """The next message. Raises `ChannelClosed` once the inbox is closed."""
        try:
            return self._decode(list(await self._socket.recv_multipart()))
        except zmq.ZMQError as error:
            raise ChannelClosed(f"the inbox {tcp.without_key(self.address)} is closed: {error}") from error

    def close(self) -> None:
        self._socket.close(linger=0)


class Outbox(Generic[Peer, Message]):
    """Sends to the inboxes of peers. Not thread-safe; `send` never blocks."""

    def __init__(self, encode: Callable[[Message], list[Frame]]) -> None:
        self._encode = encode
        self._sockets: dict[Peer, zmq.Socket[bytes]] = {}

    def connect(self, peer: Peer, address: str) -> None:
        """From now on `peer` is reached at `address`. A connection to an older address of it is closed.

        Raises `ConfigError` for what is no address.
        """
        self.disconnect(peer)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        try:
            socket.sndhwm = 0
            socket.copy_threshold = OWNED_COPY_BYTES
            _connect(socket, address)
        except BaseException:
            socket.close(linger=0)
            raise
        self._sockets[peer] = socket

    def disconnect(self, peer: Peer, *, linger_ms: int = LINGER_MS) -> None:
        """Forget `peer`; fine if it is unknown."""
        if socket := self._sockets.pop(peer, None):
            socket.close(linger=linger_ms)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._sockets

    def send(self, peer: Peer, message: Message) -> None:
        """Queue `message` for `peer`. A peer that is not connected (any more) does not get it: who has left needs no
        mail, and its `Left` has told or will tell everybody."""
        if socket := self._sockets.get(peer):
            frames = self._encode(message)
            with contextlib.suppress(zmq.Again):  # there is no limit: its connection is gone
                socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=len(frames) == 1)

    def close(self) -> None:
        """Disconnect from everybody; what was queued still goes out, for at most a second."""
        for peer in list(self._sockets):
            self.disconnect(peer)


def _open(context: zmq.Context[Any], runtime_dir: Path, name: str, host: str | None) -> tuple[Any, str]:
    """A socket that is bound, and its address."""
    socket = context.socket(zmq.PULL)
    try:
        socket.rcvhwm = 0
        if host is None:
            address = local_address(runtime_dir, name)
            socket.bind(address)
        else:
            tcp.keep_alive(socket)
            key = tcp.be_server(socket)
            address = tcp.with_key(tcp.bind_port(socket, host), key)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket, address


def _connect(socket: zmq.Socket[bytes], address: str) -> None:
    if address.startswith("ipc://"):
        socket.connect(address)
        return
    tcp.keep_alive(socket)
    # A connection that broke may have taken messages with it: better none than some. Who lives on has a new address.
    socket.reconnect_ivl = -1
    tcp.connect(socket, address)
