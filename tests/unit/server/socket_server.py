"""A server over real sockets, in the event loop of API servers, in a thread of the test."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from uvicorn.server import ServerState

from eagleray.config.build import build_config
from eagleray.server.acceptor import Acceptor, ConnectionCounts
from eagleray.server.connections import HttpConnections
from eagleray.server.http_protocol import HttpProtocol
from eagleray.server.tls import Certificates

SECONDS = 20.0
MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "test"}]}


class SocketServer:
    """Accepts from `listener`, which it closes. `/endless` writes without end, `/scope` and `/v1/models` answer JSON,
    other paths "ok". `options`: of the configuration."""

    def __init__(self, listener: socket.socket, counts_path: Path, **options: Any) -> None:
        self.listener = listener
        self._options = build_config(**options).serving
        self.counts = ConnectionCounts(counts_path, server=0)
        self.has_ended = threading.Event()
        """Set when an endless answer has ended."""
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()))
        self._thread.start()
        assert self._started.wait(SECONDS)

    async def _serve(self) -> None:
        config = uvicorn.Config(
            self._app, interface="asgi3", lifespan="off", ws="none", log_config=None, access_log=False
        )
        config.load()
        self.connections = connections = HttpConnections(
            self._options, ServerState(), open_files=1024, open_paths=[], count_refusal=lambda status: None
        )
        self.certificates = Certificates(self._options)
        acceptor = Acceptor(
            self.listener,
            make_protocol=lambda is_reserved: HttpProtocol(config, connections, is_reserved=is_reserved),
            connections=connections,
            counts=self.counts,
            certificates=self.certificates,
        )
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        acceptor.start()
        watching = asyncio.create_task(connections.watch(acceptor.report))
        self._started.set()
        await self._stop.wait()
        acceptor.close()
        watching.cancel()

    async def _app(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/endless":
            disconnected = asyncio.create_task(self._disconnected(receive))
            while not disconnected.done():
                await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
                await asyncio.sleep(0)
            self.has_ended.set()
        scope_text = json.dumps({name: scope[name] for name in ("scheme", "client", "server")})
        bodies = {"/scope": scope_text, "/v1/models": json.dumps(MODELS)}
        await send({"type": "http.response.body", "body": bodies.get(scope["path"], "ok").encode()})

    async def _disconnected(self, receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def connect(self) -> socket.socket:
        client = socket.socket(self.listener.family)
        client.settimeout(SECONDS)
        client.connect(self.listener.getsockname())
        return client

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(SECONDS)
        self.counts.close()
        self.listener.close()


def read_all(client: socket.socket) -> bytes:
    data = b""
    while more := client.recv(65536):
        data += more
    return data


def error_of(answer: bytes) -> str:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]
