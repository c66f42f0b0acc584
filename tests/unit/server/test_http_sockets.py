"""Connections over real sockets, in the event loop of API servers: the limits of time that the kernel enforces."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from eagleray.config.build import build_config
from eagleray.server.acceptor import Acceptor, ConnectionCounts
from eagleray.server.connections import HttpConnections
from eagleray.server.http_protocol import HttpProtocol

SECONDS = 20.0
OPTIONS = {"header_timeout": 0.4, "body_timeout": 0.4, "keep_alive_timeout": 0.4, "send_timeout": 1.0}


class Server:
    """A server in a thread of its own. `/endless` writes without end; other paths answer "ok"."""

    def __init__(self, path) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.counts = ConnectionCounts(path, server=0, num_servers=1)
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
        options = build_config(**OPTIONS).serving
        connections = HttpConnections(
            options, ServerState(), open_files=1024, open_paths=[], count_refusal=lambda status: None
        )
        acceptor = Acceptor(
            self.listener,
            make_protocol=lambda is_reserved: HttpProtocol(config, connections, is_reserved=is_reserved),
            connections=connections,
            counts=self.counts,
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
        await send({"type": "http.response.body", "body": b"ok"})

    async def _disconnected(self, receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=SECONDS)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(SECONDS)
        self.counts.close()
        self.listener.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "connections")
    yield server
    server.close()


def read_all(client: socket.socket) -> bytes:
    data = b""
    while more := client.recv(65536):
        data += more
    return data


def error_of(answer: bytes) -> str:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


def test_client_that_sends_without_reading_gets_its_refusal(server):
    with server.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 800_000)
        assert error_of(read_all(client)) == "headers_too_large"


def test_half_a_request_is_refused_in_time(server):
    with server.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert error_of(read_all(client)) == "request_timeout"


def test_connection_without_a_request_is_closed_in_time(server):
    with server.connect() as client:
        began = time.monotonic()
        assert read_all(client) == b""
        assert 0.3 < time.monotonic() - began < 5.0


def test_connection_between_requests_stays_open(server):
    with server.connect() as client:
        for _ in range(3):
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                more = client.recv(65536)
                assert more, "the connection was closed"
                answer += more
            assert re.match(rb"HTTP/1.1 200 .*ok", answer, re.DOTALL)


def test_client_that_reads_nothing_is_disconnected(server):
    with server.connect() as client:
        client.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        assert server.has_ended.wait(SECONDS)
