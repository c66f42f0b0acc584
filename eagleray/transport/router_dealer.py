"""Connections between processes that do not share memory: a ROUTER socket that is bound, DEALER sockets that connect.

On one host they use a Unix socket in the instance's directory, whose mode is the authentication. Between hosts they use
TCP with CURVE: only a process that knows the server's public key, which travels in handles and nowhere else, can speak
to it at all, and the connection is encrypted. A socket that has a TCP port uses CURVE on its Unix socket too: it is an
option of the whole socket.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from pathlib import Path

import msgspec
import zmq

from eagleray.errors import ChannelClosed
from eagleray.transport.runtime_dir import bind_local, is_listening, local_address
from eagleray.transport.tcp import bind_port, configure_client, configure_server, keep_alive

SECRET_BYTES = 32

LINGER_MS = 1000
"""Time in ms for which a closed socket still tries to deliver queued messages."""


class SocketAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a bound socket. It is secret: whoever has it can connect."""

    directory: str
    name: str
    """Name of the Unix socket in the directory."""
    tcp: str | None
    """`tcp://host:port`; None if the socket is bound on this host alone."""
    server_key: bytes | None
    """Public key, with `tcp`."""


def bind_router(*, runtime_dir: Path, name: str, host: str | None) -> tuple[zmq.Socket[bytes], SocketAddress]:
    """Bind a ROUTER socket in `runtime_dir` and, with `host`, to a free port of that address.

    Raises `ConfigError` if the address is not one of this host's, or if there is no room in the directory.
    """
    socket = _make(zmq.ROUTER)
    try:
        socket.router_mandatory = 1
        server_key = None if host is None else configure_server(socket)
        name = f"{name}-{secrets.token_hex(4)}"
        bind_local(socket, runtime_dir, name)
        tcp = None if host is None else bind_port(socket, host)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket, SocketAddress(directory=str(runtime_dir), name=name, tcp=tcp, server_key=server_key)


def close_router(socket: zmq.Socket[bytes], contact: SocketAddress) -> None:
    """Unbind. Queued messages are still sent, for at most a second."""
    (Path(contact.directory) / contact.name).unlink(missing_ok=True)  # zmq does not remove the file
    socket.close()


def connect_dealer(
    contact: SocketAddress, *, runtime_dir: Path | None = None, media: Collection[str] = ("ipc", "tcp")
) -> tuple[zmq.Socket[bytes], str]:
    """Connect a DEALER socket. Returns it with the medium: "ipc" if the Unix socket is there, else "tcp".

    `runtime_dir` is the path of the directory as seen from here, if it has another name. Raises `ChannelClosed` if
    there is no way.
    """
    directory = Path(contact.directory) if runtime_dir is None else runtime_dir
    if "ipc" in media and is_listening(directory / contact.name):  # zmq would try for ever
        medium, address = "ipc", local_address(directory, contact.name)
    elif "tcp" in media and contact.tcp is not None:
        medium, address = "tcp", contact.tcp
    else:
        raise ChannelClosed(
            f"the engine cannot be reached from here: nobody listens at {directory / contact.name}, and "
            f"{'it has bound no TCP port' if contact.tcp is None else 'TCP is not to be used'}"
        )
    socket = _make(zmq.DEALER)
    if contact.server_key is not None:
        configure_client(socket, contact.server_key)
    socket.ipv6 = "[" in address
    socket.connect(address)
    return socket, medium


def can_receive(socket: zmq.Socket[bytes]) -> bool:
    """Whether something can be received without waiting."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _make(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.sndhwm = socket.rcvhwm = 0  # bounded by credits, or by one heartbeat a second
    socket.linger = LINGER_MS
    keep_alive(socket)
    return socket
