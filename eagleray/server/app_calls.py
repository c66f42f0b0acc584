"""Calls of the HTTP application inside this process, so that a program's answers are those of a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope


class AppAnswer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    retry_after: float
    """Seconds after which the client should try again; 0 if the answer names no time."""


class StreamedAnswer:
    """Answer of the application while it is received."""

    def __init__(self) -> None:
        self.status = 500
        self.has_status = False
        """Whether `status` and `headers` are those of the answer."""
        self.headers = Headers()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._has_begun = asyncio.Event()

    async def wait_until_begun(self) -> None:
        """Wait until the answer has begun, or until there will be none."""
        await self._has_begun.wait()

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts of the body as the application sends them."""
        while (part := await self._parts.get()) is not None:
            yield part

    async def body(self) -> bytes:
        """Return the whole body."""
        return b"".join([part async for part in self.parts()])

    async def send(self, message: Message) -> None:
        """Take a message of the application."""
        if message["type"] == "http.response.start":
            self.status, self.has_status = message["status"], True
            self.headers = Headers(raw=message.get("headers", []))
            self._has_begun.set()
        elif part := message.get("body", b""):
            self._parts.put_nowait(part)

    def end(self) -> None:
        """Mark that the application sends no more."""
        self._has_begun.set()
        self._parts.put_nowait(None)


async def post(app: ASGIApp, path: str, body: bytes, *, request_id: str) -> AppAnswer:
    """Post a JSON body to a route of `app`. A call that is cancelled aborts its request."""
    async with posted(app, path, body, headers=[("x-request-id", request_id)]) as answer:
        retry_after = answer.headers.get("retry-after", "0")
        content = await answer.body()
        return AppAnswer(answer.status, content, float(retry_after) if retry_after.isdigit() else 0.0)


@contextlib.asynccontextmanager
async def posted(
    app: ASGIApp, path: str, body: bytes, *, headers: Iterable[tuple[str, str]]
) -> AsyncIterator[StreamedAnswer]:
    """Post a JSON body to a route of `app`, and yield the answer once it has begun. Leaving the block before the end of
    the answer aborts the request. `headers`: without those of the body. Raises what the application raises."""
    answer = StreamedAnswer()
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # the client stays until it has its answer
        raise AssertionError

    async def run() -> None:
        try:
            await app(_scope(path, body, headers), receive, answer.send)
        finally:
            answer.end()

    calling = asyncio.create_task(run())
    try:
        await answer.wait_until_begun()
        if not answer.has_status:
            await calling  # raises the error of an application that has sent nothing
        yield answer
        await calling
    finally:
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)


def _scope(path: str, body: bytes, headers: Iterable[tuple[str, str]]) -> Scope:
    own = [("content-type", "application/json"), ("content-length", str(len(body)))]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (*own, *headers)],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
