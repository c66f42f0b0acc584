"""The store through which ranks find each other before they have torch.distributed connections. It lives in the process
of rank 0, which binds it to a free port of one address and reports the port, so that no port has to be guessed."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from eagleray.errors import ChannelClosed, ConfigError, DeadlineExceeded
from eagleray.parallel.timeouts import STORE_BIND_TIMEOUT_SECONDS

LOOPBACK = "127.0.0.1"
"""An address that other machines cannot reach."""


def bind_store(host: str) -> tuple[TCPStore, str]:
    """Return the store and its address `host:port`. Raises `ConfigError` if `host` is not an address of this
    machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        try:
            listening.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} for the other workers ({error}): it must be an address of this machine that "
                "the nodes of the other workers can reach"
            ) from error
        listening.listen()
        port = listening.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=STORE_BIND_TIMEOUT_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    return store, f"{host}:{port}"


def reach_store(address: str, *, timeout: float) -> TCPStore:
    """Connect to the store of rank 0. Raises `DeadlineExceeded` if rank 0 is not reached within `timeout` seconds."""
    host, _, port = address.rpartition(":")
    began = time.monotonic()
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        if time.monotonic() - began < timeout:
            raise ChannelClosed(f"rank 0 of the engine cannot be reached at {address}: {error}") from error
        raise DeadlineExceeded(
            f"rank 0 of the engine was not reached at {address} within {timeout:g} s: {error}"
        ) from error
