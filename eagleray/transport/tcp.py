"""TCP sockets with CURVE: a process without a socket's public key can send nothing to it, and the connection is
encrypted.

Shared by `inbox` and `router_dealer`. A server has a key pair of its own, made for it; its public key is the secret,
and travels only where its address does. A client's key pair is made for a connection and not checked.
"""

from __future__ import annotations

import re

import zmq
from zmq.utils import z85

from eagleray.errors import ConfigError

KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 10, zmq.TCP_KEEPALIVE_INTVL: 5, zmq.TCP_KEEPALIVE_CNT: 4}
"""TCP keepalive options: a host that vanished is noticed after half a minute."""

ADDRESS = re.compile(r"(?P<server>tcp://(?:\[[^\]]+\]|[^\[\]:]+):\d+)\?(?P<key>[0-9a-fA-F]{64})")


def keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Set the keepalive options, before the socket is bound or connected."""
    for option, value in KEEPALIVE.items():
        socket.setsockopt(option, value)


def configure_server(socket: zmq.Socket[bytes]) -> bytes:
    """Give `socket` a key pair, before it is bound, and return its public key, 32 bytes."""
    public, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_server = True
    return z85.decode(public)


def configure_client(socket: zmq.Socket[bytes], server_key: bytes) -> None:
    """Restrict `socket` to servers with this public key, 32 bytes, before it is connected."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = server_key


def bind_port(socket: zmq.Socket[bytes], host: str) -> str:
    """Bind `socket` to a free port of the address `host` and return `tcp://host:port`, an IPv6 address in brackets.

    Raises `ConfigError` if it is not an address of this host.
    """
    socket.ipv6 = ":" in host
    address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    try:
        socket.bind(f"{address}:0")
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot listen on {host} for processes of other nodes ({error}): it must be an address of this host that "
            "the other nodes can reach"
        ) from error
    port = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2].decode()
    return f"{address}:{port}"


def with_key(server: str, key: bytes) -> str:
    """Return `tcp://host:port?key`, all that is needed to connect. The key is in hex."""
    return f"{server}?{key.hex()}"


def without_key(address: str) -> str:
    """Return the address without its secret, for logs."""
    return address.partition("?")[0]


def connect(socket: zmq.Socket[bytes], address: str) -> None:
    """Connect to `address`, with its key. Raises `ConfigError` if it is invalid."""
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise ConfigError(
            f"{without_key(address)!r} is not the address of an inbox: expected ipc://PATH, or tcp://HOST:PORT?KEY "
            "with its public key in hex"
        )
    configure_client(socket, bytes.fromhex(match["key"]))
    socket.ipv6 = "[" in address
    socket.connect(match["server"])
