"""A raw HTTP/1.1 client: it sends exactly the given bytes, and reads any answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Address = tuple[str, int]

REPLY_SECONDS = 60.0
KEPT_BYTES = 2**20
"""Bytes of a body that are kept; longer bodies are still read to their end."""

PIECE_BYTES = 2**18
HEAD_LIMIT = 2**20


class Broken(Exception):
    """Raised if the connection was closed before a whole answer had arrived."""


@dataclass
class Reply:
    """An HTTP answer. `status` is 0 if there was no answer, and `trouble` then gives the cause."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    num_bytes: int = 0
    seconds: float = 0.0
    trouble: str = ""

    def json(self) -> Any:
        """Decode the body. Raises `ValueError` if it is not JSON."""
        return json.loads(self.body)


def request(method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a well-formed request that asks the server to close the connection."""
    lines = {"Host": "fuzz", "Connection": "close"}
    if body is not None:
        lines |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    lines |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + (body or b"")


async def get(address: Address, path: str, *, seconds: float = REPLY_SECONDS) -> Reply:
    return await exchange(address, [request("GET", path)], seconds=seconds)


async def post(
    address: Address,
    path: str,
    body: bytes,
    *,
    headers: Mapping[str, str] | None = None,
    seconds: float = REPLY_SECONDS,
) -> Reply:
    return await exchange(address, [request("POST", path, body, headers)], seconds=seconds)


async def exchange(address: Address, pieces: Iterable[bytes], *, seconds: float = REPLY_SECONDS) -> Reply:
    """Send the pieces one after another and return the first answer, which may arrive before all are sent."""
    began = time.monotonic()
    reply = Reply()
    try:
        async with asyncio.timeout(seconds):
            await _exchange(address, pieces, reply)
    except TimeoutError:
        reply.trouble = f"no whole answer within {seconds:g} s"
    except (Broken, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        reply.trouble = f"{type(error).__name__}: {error}"
    if reply.trouble:
        reply.status = 0
    reply.seconds = time.monotonic() - began
    return reply


async def _exchange(address: Address, pieces: Iterable[bytes], reply: Reply) -> None:
    reader, writer = await asyncio.open_connection(*address, limit=HEAD_LIMIT)
    sending = asyncio.create_task(_send(writer, pieces))
    try:
        await _read_reply(reader, reply)
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await sending
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        view = memoryview(piece)
        for at in range(0, len(view), PIECE_BYTES):
            writer.write(view[at : at + PIECE_BYTES])
            await writer.drain()


async def _read_reply(reader: asyncio.StreamReader, reply: Reply) -> None:
    reply.status, reply.headers = await _read_head(reader)
    async for data in _body(reader, reply.headers):
        reply.num_bytes += len(data)
        if len(reply.body) < KEPT_BYTES:
            reply.body += data


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = 100
    while status == 100:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        words = first.split(" ")
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise Broken(f"not an HTTP answer: {first[:80]!r}")
        status = int(words[1])
    pairs = (line.partition(":") for line in lines if line)
    return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while (size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)) > 0:
            async for data in _exactly(reader, size):
                yield data
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
        return
    if (length := headers.get("content-length")) is not None:
        async for data in _exactly(reader, int(length)):
            yield data
        return
    while data := await reader.read(PIECE_BYTES):
        yield data


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size > 0:
        data = await reader.read(min(size, PIECE_BYTES))
        if not data:
            raise Broken(f"the answer ended {size} bytes early")
        size -= len(data)
        yield data


@contextlib.asynccontextmanager
async def open_stream(address: Address, payload: bytes) -> AsyncIterator[tuple[Reply, asyncio.StreamReader]]:
    """Send a request and read the head of its answer; the caller reads the body."""
    reader, writer = await asyncio.open_connection(*address, limit=HEAD_LIMIT)
    try:
        writer.write(payload)
        await writer.drain()
        reply = Reply()
        reply.status, reply.headers = await _read_head(reader)
        yield reply, reader
    finally:
        writer.transport.abort()


async def stream_events(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event."""
    received = b""
    async for data in _body(reader, headers):
        *events, received = (received + data).split(b"\n\n")
        for event in events:
            yield event.removeprefix(b"data: ")
