"""Answers: one JSON value, or a stream of events; and what a client that goes away does to them.

The ASGI messages are written directly: at thousands of events a second every layer between would be felt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from eagleray.server.error_responses import error_response

T = TypeVar("T")

MSGPACK = "application/msgpack"

Emit = Callable[[Any], Awaitable[None]]
"""Sends one event; waits while the reader is behind."""

ENCODER = msgspec.json.Encoder()
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that know it pass events on as they come
]


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer with `value` as its JSON body."""
    return Response(ENCODER.encode(value), status, headers, media_type="application/json")


def msgpack_response(value: Any) -> Response:
    """The same as msgpack, where bytes need no base64."""
    return Response(msgspec.msgpack.encode(value), media_type=MSGPACK)


def accepts(headers: Headers, media_type: str) -> bool:
    """Whether the request asks for answers of this media type by its name."""
    names = (part.partition(";")[0].strip().lower() for part in headers.get("accept", "").split(","))
    return media_type in names


class EventStream:
    """A response of server-sent events, ended by `[DONE]`.

    `produce(emit)` makes the events. The status is sent with the first of them, so an error before it is an ordinary
    error reply; one after it is an event. If the client goes away, `produce` is cancelled.
    """

    def __init__(self, produce: Callable[[Emit], Coroutine[Any, Any, None]], request_id: str) -> None:
        self._produce = produce
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        started = False

        async def start() -> None:
            nonlocal started
            started = True
            await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_HEADERS]})

        async def emit(event: Any) -> None:
            if not started:
                await start()
            body = b"data: " + ENCODER.encode(event) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            await self._produce(emit)
        except Exception as error:
            if not started:
                raise
            await emit(error_response(error, self._request_id).reply)
        if not started:
            await start()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; or, if the client goes away first, cancels it and raises `ClientDisconnect`.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        # The work's own clean-up (it tells the engine) is over before the request counts as answered.
        await asyncio.gather(task, watch, return_exceptions=True)
        # A task that failed keeps this frame, by its exception, and so itself: with a body of megabytes, until Python's
        # collector comes by.
        del task, watch


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
