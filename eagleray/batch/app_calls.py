"""Calls of the HTTP application inside this process, so that a batch's answers are those of a server."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import ASGIApp, Message, Scope


class AppAnswer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    retry_after: float
    """Seconds after which the client should try again; 0 if the answer names no time."""


async def post(app: ASGIApp, path: str, body: bytes, *, request_id: str) -> AppAnswer:
    """Post a JSON body to a route of `app`. A call that is cancelled aborts its request."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
        ],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    outgoing = bytearray()
    status, retry_after = 500, 0.0

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # the client stays until it has its answer
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, retry_after
        if message["type"] == "http.response.start":
            status = message["status"]
            retry_after = _seconds(dict(message.get("headers", ())).get(b"retry-after", b"0"))
        else:
            outgoing.extend(message.get("body", b""))

    await app(scope, receive, send)
    return AppAnswer(status, bytes(outgoing), retry_after)


def _seconds(value: bytes) -> float:
    return float(value) if value.isdigit() else 0.0
