"""HTTP connections without sockets: bytes are parsed at once, answers are kept, and the test advances the clock."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from uvicorn.server import ServerState

from eagleray.config.build import build_config
from eagleray.errors import EagleRayError
from eagleray.server.connections import HttpConnections
from eagleray.server.error_responses import error_response
from eagleray.server.http_protocol import HttpProtocol
from eagleray.server.http_responses import json_response


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)["error"]


class FakeTransport:
    """A transport whose methods take effect at once."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = self.is_aborted = self.has_sent_eof = self.is_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        assert not self.has_sent_eof
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_sent_eof = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class App:
    """An application that echoes requests. `/stream` waits for `go_on`, `/ignore` does not read the body."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.errors: list[str | None] = []
        """Codes of the errors that reading a body raised."""
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        request = Request(scope, receive)
        try:
            if request.url.path == "/stream":
                response: Any = StreamingResponse(self._stream())
            elif request.url.path == "/ignore":
                response = json_response("ignored")
            else:
                body = await request.body()
                response = PlainTextResponse(f"{request.method} {request.url.path} ".encode() + body)
        except EagleRayError as error:
            refusal = error_response(error, "id")
            self.errors.append(refusal.reply.error.code)
            response = json_response(refusal.reply, refusal.status, refusal.headers)
        await response(scope, receive, send)

    async def _stream(self) -> Any:
        yield b"first "
        await self.go_on.wait()
        yield b"last"


class HttpServer:
    """Connections to `app`, in an event loop that the test runs step by step."""

    def __init__(self, runner: asyncio.Runner, *, open_files: int = 1024, **options: Any) -> None:
        self._runner = runner
        self.refusals: list[int] = []
        self.connections = HttpConnections(
            build_config(**options).serving,
            ServerState(),
            open_files=open_files,
            open_paths=["/live"],
            count_refusal=self.refusals.append,
        )
        self.run(self._open())

    async def _open(self) -> None:
        self.app = App()
        self.config = uvicorn.Config(self.app, lifespan="off", ws="none", log_config=None, access_log=False)
        self.config.load()

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    def settle(self) -> None:
        async def settle() -> None:
            for _ in range(400 if self.connections.state.tasks else 2):
                await asyncio.sleep(0)

        self.run(settle())

    def protocol(self, is_reserved: bool) -> HttpProtocol:
        return HttpProtocol(self.config, self.connections, is_reserved=is_reserved)

    def connect(self) -> Connection:
        return Connection(self)

    def pass_time(self, seconds: float) -> None:
        self.connections.tick(seconds)
        self.settle()


class Connection:
    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self.transport = FakeTransport()
        self.is_within_limit = server.connections.admit()

        async def connect() -> None:
            self.protocol = server.protocol(not self.is_within_limit)
            self.protocol.connection_made(self.transport)

        server.run(connect())

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._receive(piece)
            self._server.settle()

    def _receive(self, piece: bytes) -> None:
        async def receive() -> None:
            self.protocol.data_received(piece)

        self._server.run(receive())

    def lose(self) -> None:
        self.protocol.connection_lost(None)

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closed and not self.transport.has_sent_eof

    def answers(self) -> list[Answer]:
        """Return the complete answers that were written since the last call."""
        data, found = self.transport.written, []
        while data:
            head, _, data = data.partition(b"\r\n\r\n")
            status, *lines = head.decode().split("\r\n")
            headers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
            body = b""
            if "content-length" in headers:
                size = int(headers["content-length"])
                body, data = data[:size], data[size:]
            while headers.get("transfer-encoding") == "chunked":
                size_text, _, data = data.partition(b"\r\n")
                size = int(size_text, 16)
                body, data = body + data[:size], data[size + 2 :]
                if size == 0:
                    break
            found.append(Answer(int(status.split()[1]), headers, body))
        self.transport.written = b""
        return found

    def answer(self) -> Answer:
        (answer,) = self.answers()
        return answer


def request(path: str = "/echo", *headers: str, method: str = "GET", body: bytes | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: test", *headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")
