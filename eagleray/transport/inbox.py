"""Inboxes, which receive messages, and outboxes, which send to the inboxes of peers.

An inbox is a zmq PULL socket that its owner binds; an outbox holds one PUSH socket for each connected peer. Queues are
unbounded in number: the messages are small (token ids) and bounded by the admitted requests, and a send that blocked
would stop the engine for every client.

A connection between hosts that breaks is not made again: messages may be lost with it, and none arriving is better than
some. The owner of the outbox polls for broken connections (`pop_broken`) and reacts.

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
from zmq.utils.monitor import recv_monitor_message

from eagleray.errors import ChannelClosed
from eagleray.transport import tcp
from eagleray.transport.runtime_dir import bind_local

Frame = bytes | bytearray | memoryview
Message = TypeVar("Message")
Peer = TypeVar("Peer", bound=Hashable)

LINGER_MS = 1000
"""Time in ms for which a closed outbox still tries to deliver queued messages."""

BREAKS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Events after which no sent message arrives."""

OWNED_COPY_BYTES = 65536
"""Size from which on zmq sends a frame from where it is and keeps it alive; smaller ones are copied."""


class Inbox(Generic[Message]):
    """Inbox of a process that waits in a thread.

    Bound in `runtime_dir`, or to a free port of the address `host`, for peers of other hosts. Raises `ConfigError` if
    that is not an address of this host, or if there is no room in the directory.
    """

    def __init__(
        self, runtime_dir: Path, name: str, decode: Callable[[list[Frame]], Message], host: str | None = None
    ) -> None:
        self._decode = decode
        self._socket, self.address = _open(zmq.Context.instance(), runtime_dir, name, host)

    def receive(self, timeout: float | None) -> Message | None:
        """Return the next message, or None after `timeout` seconds (0 does not wait, None waits for ever).

        Raises `msgspec.ValidationError` for bytes that are no message of this wire.
        """
        try:
            if timeout is None or self._socket.poll(timeout * 1000):
                return self._decode(list(self._socket.recv_multipart()))
        except zmq.ZMQError as error:
            raise ChannelClosed(f"the inbox {tcp.without_key(self.address)} is closed: {error}") from error
        return None

    def close(self) -> None:
        """Unbind. Messages that had arrived and were not received are dropped."""
        self._socket.close(linger=0)


class AsyncInbox(Generic[Message]):
    """Inbox of a process that waits in an event loop. Must be made inside that loop; arguments as for `Inbox`."""

    def __init__(
        self, runtime_dir: Path, name: str, decode: Callable[[list[Frame]], Message], host: str | None = None
    ) -> None:
        self._decode = decode
        self._socket, self.address = _open(zmq.asyncio.Context.instance(), runtime_dir, name, host)

    async def receive(self) -> Message:
        """Return the next message. Raises `ChannelClosed` once the inbox is closed."""
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
        self._monitors: dict[Peer, zmq.Socket[bytes]] = {}
        """Monitor sockets of the peers on other hosts whose connection has not been found broken."""

    def connect(self, peer: Peer, address: str) -> None:
        """Connect to `peer` at `address`. A connection to an older address of it is closed.

        Raises `ConfigError` for an invalid address.
        """
        self.disconnect(peer)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        try:
            socket.sndhwm = 0
            socket.copy_threshold = OWNED_COPY_BYTES
            if not address.startswith("ipc://"):
                self._monitors[peer] = socket.get_monitor_socket(BREAKS)
            _connect(socket, address)
        except BaseException:
            self._forget_monitor(peer, socket)
            socket.close(linger=0)
            raise
        self._sockets[peer] = socket

    def disconnect(self, peer: Peer, *, linger_ms: int = LINGER_MS) -> None:
        """Disconnect from `peer`; an unknown peer is ignored."""
        if socket := self._sockets.pop(peer, None):
            self._forget_monitor(peer, socket)
            socket.close(linger=linger_ms)

    def pop_broken(self) -> list[Peer]:
        """Return the peers whose connections have broken since the last call, by the network or by their exit. They are
        never reached again at the same address."""
        broken = [peer for peer, monitor in self._monitors.items() if _has_broken(monitor)]
        for peer in broken:
            self._forget_monitor(peer, self._sockets[peer])
        return broken

    def _forget_monitor(self, peer: Peer, socket: zmq.Socket[bytes]) -> None:
        if monitor := self._monitors.pop(peer, None):
            socket.disable_monitor()
            monitor.close(linger=0)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._sockets

    def send(self, peer: Peer, message: Message) -> None:
        """Queue `message` for `peer`. A peer that is not connected does not get it: its `Left` informs all members."""
        if socket := self._sockets.get(peer):
            frames = self._encode(message)
            with contextlib.suppress(zmq.Again):  # queues have no limit, so the peer is disconnected
                socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=len(frames) == 1)

    def close(self) -> None:
        """Disconnect from all peers; queued messages are still sent, for at most a second."""
        for peer in list(self._sockets):
            self.disconnect(peer)


def _has_broken(monitor: zmq.Socket[bytes]) -> bool:
    while monitor.poll(0):
        if recv_monitor_message(monitor)["event"] & BREAKS:
            return True
    return False


def _open(context: zmq.Context[Any], runtime_dir: Path, name: str, host: str | None) -> tuple[Any, str]:
    """Bind a socket and return it with its address."""
    socket = context.socket(zmq.PULL)
    try:
        socket.rcvhwm = 0
        if host is None:
            address = bind_local(socket, runtime_dir, name)
        else:
            tcp.keep_alive(socket)
            key = tcp.configure_server(socket)
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
    socket.reconnect_ivl = -1  # a broken connection may have lost messages: see the module
    tcp.connect(socket, address)
