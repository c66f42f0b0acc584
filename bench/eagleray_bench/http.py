"""HTTP/1.1 to one server, over connections that are kept: for load that must cost little itself.

asyncio protocols and a parser in C (httptools, which the server's side has too); nothing is between a read from the
socket and whoever wants the body.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from eagleray.errors import DeadlineExceeded, Unavailable, UserError

__all__ = ["HttpClient", "Reply"]

REUSE_SECONDS = 2.0
"""A connection that was idle for longer is not used again: the server may be about to close it."""
MAX_BODY_BYTES = 2**20


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes
    """Empty if it went to `on_body`."""


class HttpClient:
    """`url`: http://HOST:PORT or https://…, with or without a path, to which the paths of requests are added.

    Raises `UserError` if it is none.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UserError(f"--base-url {url}: expected http://HOST:PORT")
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        headers = f"host: {parts.netloc.rpartition('@')[2]}\r\n"
        if api_key:
            headers += f"authorization: Bearer {api_key}\r\n"
        self._headers = headers
        self._idle: list[tuple[_Connection, float]] = []

    async def get(self, path: str, *, timeout: float) -> Reply:
        return await self._request("GET", path, b"", None, timeout)

    async def post(
        self, path: str, body: bytes, *, timeout: float, on_body: Callable[[bytes], None] | None = None
    ) -> Reply:
        """Send JSON. `on_body` gets the parts of the body as they are read, if the status is 200.

        Raises `Unavailable` if the server cannot be reached, or hangs up before the end of its answer, and
        `DeadlineExceeded` after `timeout` seconds.
        """
        return await self._request("POST", path, body, on_body, timeout)

    def close(self) -> None:
        for connection, _ in self._idle:
            connection.abort()
        self._idle.clear()

    async def _request(
        self, method: str, path: str, body: bytes, on_body: Callable[[bytes], None] | None, timeout: float
    ) -> Reply:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n"
        if body:
            head += "content-type: application/json\r\n"
        try:
            async with asyncio.timeout(timeout):
                connection = self._pooled() or await self._connect()
                try:
                    reply = await connection.exchange(head.encode("latin-1") + b"\r\n" + body, on_body)
                except BaseException:
                    connection.abort()
                    raise
        except TimeoutError:
            raise DeadlineExceeded(f"no complete answer within {timeout:g} s") from None
        if connection.can_be_used_again:
            self._idle.append((connection, asyncio.get_running_loop().time()))
        else:
            connection.abort()
        return reply

    def _pooled(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection, since = self._idle.pop()
            if connection.can_be_used_again and now - since < REUSE_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
            raise Unavailable(f"no server answers at {self.url}: {_reason(error)}") from None
        return connection


class _Connection(asyncio.Protocol):
    """One exchange after the other. The methods `on_…` are the parser's."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answered: asyncio.Future[Reply] | None = None
        self._on_body: Callable[[bytes], None] | None = None
        self._body = bytearray()
        self._is_streamed = False
        self._keeps_alive = True

    @property
    def can_be_used_again(self) -> bool:
        return self._keeps_alive and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, on_body: Callable[[bytes], None] | None) -> Reply:
        assert self._transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self._on_body = on_body
        self._body.clear()
        self._transport.write(request)
        return await self._answered

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"what the server sends is not HTTP: {error}")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._keeps_alive = False
        self._fail("the server closed the connection before the end of its answer")

    def on_headers_complete(self) -> None:
        self._is_streamed = self._on_body is not None and self._parser.get_status_code() == 200

    def on_body(self, body: bytes) -> None:
        if self._is_streamed and self._on_body is not None:
            self._on_body(body)
        elif len(self._body) < MAX_BODY_BYTES:
            self._body += body

    def on_message_complete(self) -> None:
        self._keeps_alive = self._parser.should_keep_alive()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(Reply(self._parser.get_status_code(), bytes(self._body)))

    def _fail(self, cause: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(Unavailable(cause))


def _reason(error: Exception) -> str:
    """The system's own words: asyncio's name every address that was tried."""
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error)
