"""HTTP to one server over kept connections: aiohttp, with the errors and the few calls that the benchmarks need."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

from eagleray.errors import DeadlineExceeded, Unavailable, UserError

REUSE_SECONDS = 2.0
"""A connection that was idle for longer is not used again, because the server may be about to close it."""


class HttpReply(NamedTuple):
    """A whole reply."""

    status: int
    body: bytes
    """Empty if it was passed to `on_body`."""


class HttpClient:
    """Client of the server at `url`, made in the event loop that uses it and closed by `async with`.

    `url` is http://HOST:PORT or https://…, with or without a path, to which the paths of requests are added; any other
    raises `UserError`.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = check_server_url(url)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            # what the server compressed would be measured too
            skip_auto_headers=["Accept-Encoding", "User-Agent"],
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=REUSE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, path: str, *, timeout: float) -> HttpReply:
        """Raises as `post` does."""
        return await self._request("GET", path, None, None, timeout)

    async def post(
        self, path: str, body: bytes, *, timeout: float, on_body: Callable[[bytes], None] | None = None
    ) -> HttpReply:
        """Send JSON. `on_body` gets the parts of the body as they are read, if the status is 200.

        Raises `Unavailable` if the server cannot be reached or closes the connection before the end of its answer, and
        `DeadlineExceeded` after `timeout` seconds.
        """
        return await self._request("POST", path, body, on_body, timeout)

    async def _request(
        self, method: str, path: str, body: bytes | None, on_body: Callable[[bytes], None] | None, timeout: float
    ) -> HttpReply:
        headers = None if body is None else {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(timeout),
                self._session.request(method, self.url + path, data=body, headers=headers) as response,
            ):
                if on_body is None or response.status != 200:
                    return HttpReply(response.status, await response.read())
                while part := await response.content.readany():
                    on_body(part)
                return HttpReply(response.status, b"")
        except TimeoutError:
            raise DeadlineExceeded(f"no complete answer within {timeout:g} s") from None
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise Unavailable(f"no server answers at {self.url}: {_reason(error)}") from None
        except aiohttp.ClientResponseError as error:
            raise Unavailable(f"what the server sends is not HTTP: {error.message}") from None
        except aiohttp.ClientError:
            raise Unavailable("the server closed the connection before the end of its answer") from None


def check_server_url(url: str) -> str:
    """Return `url` without credentials and without a slash at its end. Raises `UserError` if it is not a server's."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise UserError(f"--base-url {url}: expected http://HOST:PORT")
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def request_once(url: str, *, body: bytes | None = None, timeout: float) -> HttpReply:
    """Send a GET, or a POST if there is a body, without an event loop. Raises as `HttpClient.post` does."""

    async def send() -> HttpReply:
        async with HttpClient(url) as client:
            return await (client.get("", timeout=timeout) if body is None else client.post("", body, timeout=timeout))

    return asyncio.run(send())


def _reason(error: aiohttp.ClientError) -> str:
    """Return the operating system's text for the error: asyncio's names every address that was tried."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno and not isinstance(cause, socket.gaierror):
        return os.strerror(cause.errno)
    return getattr(cause, "strerror", None) or str(cause)
