"""The API server process, from its birth to its end: bind, be attached, serve HTTP.

Several servers accept from one listening socket, which the supervisor holds. Each closes its own descriptor of it, or
dies with it, and the others go on; `shutdown` would end the socket for all of them, and is called by nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from eagleray.client import Client, open_client
from eagleray.messages.lifecycle import ApiServerSpec, Bound
from eagleray.metrics import Ledger
from eagleray.process import Parent, settle
from eagleray.server.app import create_app

__all__ = ["run"]

KEEP_ALIVE_SECONDS = 60
FLUSH_SECONDS = 2
"""What connections get to take the last bytes of their answers when the server ends."""
DRAIN_POLL_SECONDS = 0.02


class _Server(uvicorn.Server):
    """Leaves the signals alone: the supervisor says when to stop, and how patiently."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(payload: bytes, parent: Parent) -> None:
    """Be the API server that `payload`, an encoded `ApiServerSpec`, describes."""
    spec = msgspec.msgpack.decode(payload, type=ApiServerSpec)
    with contextlib.closing(Ledger.open(Path(spec.runtime_dir) / "metrics", spec.client.index)) as ledger:
        uvloop.run(_serve(spec, parent, ledger))


async def _serve(spec: ApiServerSpec, parent: Parent, ledger: Ledger) -> None:
    client = open_client(
        spec.client,
        spec.config,
        Path(spec.runtime_dir),
        host=spec.host,
    )
    config = uvicorn.Config(
        create_app(client, spec.config, ledger),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    server = _Server(config)
    settle()
    parent.send(Bound(client.address))
    with socket.socket(fileno=spec.listener_fd) as listener:
        serving = asyncio.create_task(_accept(server, listener, client))
        reading = asyncio.create_task(client.run())
        stopping = asyncio.create_task(client.stopping.wait())
        await asyncio.wait([serving, reading, stopping], return_when=asyncio.FIRST_COMPLETED)
        await _drain(client)
        await client.close()  # what still runs ends as aborted, and its connection properly
        server.should_exit = True
        if not client.attached.is_set():
            serving.cancel()
        else:
            await serving
        stopping.cancel()
        await reading


async def _accept(server: _Server, listener: socket.socket, client: Client) -> None:
    """Serve once the client knows of the engines. Until then it could only refuse: to wait in the backlog is better."""
    await client.attached.wait()
    await server.serve(sockets=[listener])


async def _drain(client: Client) -> None:
    """Let running requests finish within the grace. Connections are still accepted: the app tells them 503.

    Would the socket be closed now, new clients would hang in its backlog, which the supervisor keeps open.
    """
    deadline = time.monotonic() + client.grace
    while client.num_in_flight and time.monotonic() < deadline:
        await asyncio.sleep(DRAIN_POLL_SECONDS)
