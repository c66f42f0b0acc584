"""An HTTP server for the load generator: raw bytes by script, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

MODELS = {"data": [{"id": "small", "max_model_len": 64, "root": "/nowhere"}, {"id": "other"}]}


class Request:
    """A received request, and the means to answer it."""

    def __init__(self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], body: bytes) -> None:
        self._writer = writer
        self.path = path
        self.headers = headers
        self.body: Any = json.loads(body) if body else None

    async def reply(self, status: int, content: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n"
        await self.write(head.encode() + content)

    async def begin_stream(self) -> None:
        await self.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    async def event(self, content: Any) -> None:
        data = b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.write(b"0\r\n\r\n")

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


Handler = Callable[[Request], Awaitable[None]]


async def answer(request: Request) -> None:
    """Answer with the requested number of tokens."""
    if request.path == "/v1/models":
        await request.reply(200, json.dumps(MODELS).encode())
        return
    num_tokens = request.body["max_tokens"]
    await request.begin_stream()
    for index in range(num_tokens):
        end = "length" if index == num_tokens - 1 else None
        choice = {"index": 0, "finish_reason": end}
        said = {"delta": {"content": "x"}} if "messages" in request.body else {"text": "x"}
        await request.event({"choices": [choice | said]})
    usage = {"prompt_tokens": num_prompt_tokens(request.body), "completion_tokens": num_tokens}
    await request.event({"choices": [], "usage": usage})
    await request.event(b"[DONE]")
    await request.end_stream()


def num_prompt_tokens(body: dict[str, Any]) -> int:
    """Count the prompt's tokens: a word of a chat is two, its template eight."""
    if "prompt" in body:
        return len(body["prompt"])
    return 8 + 2 * len(body["messages"][0]["content"].split())


class LoadServer:
    """Records all `requests`, and the numbers of connections and of requests at once."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[Request] = []
        self.num_connections = 0
        self.running = self.peak = 0
        self.url = ""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while request := await self._read(reader, writer):
                self.requests.append(request)
                self.running += 1
                self.peak = max(self.peak, self.running)
                try:
                    await self._handler(request)
                finally:
                    self.running -= 1
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Request(writer, first.split()[1], headers, body)


@asynccontextmanager
async def load_server(handler: Handler = answer) -> AsyncIterator[LoadServer]:
    server = LoadServer(handler)
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(server.connected(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
