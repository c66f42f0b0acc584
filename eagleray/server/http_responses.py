"""Answers, as one JSON value or as a stream of events, and their cancellation when the client disconnects.

The ASGI messages are written directly, because every layer between costs time at thousands of events a second.
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

from eagleray.server.error_responses import HttpError, error_response

T = TypeVar("T")

MSGPACK = "application/msgpack"

Emit = Callable[[Any], Awaitable[None]]
"""Sends one event. Waits while the client reads too slowly."""

ENCODER = msgspec.json.Encoder()
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that know this header pass events on at once
]


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer with `value` as its JSON body."""
    return Response(ENCODER.encode(value), status, headers, media_type="application/json")


def msgpack_response(value: Any) -> Response:
    """Return an answer with `value` as its msgpack body, in which bytes need no base64."""
    return Response(msgspec.msgpack.encode(value), media_type=MSGPACK)


def accepts(headers: Headers, media_type: str) -> bool:
    """Whether the request asks for answers of this media type by its name."""
    names = (part.partition(";")[0].strip().lower() for part in headers.get("accept", "").split(","))
    return media_type in names


class EventStream:
    """A response of server-sent events.

    `produce(emit)` makes the events. The status is sent with the first event, so an error before it becomes an ordinary
    answer, and a later one the event that `error_event` returns. `produce` is cancelled if the client disconnects.
    With `is_named` each event carries its name, the tag of its struct; otherwise `[DONE]` ends the stream.
    """

    def __init__(
        self,
        produce: Callable[[Emit], Coroutine[Any, Any, None]],
        request_id: str,
        *,
        error_event: Callable[[HttpError], Any] = lambda error: error.reply,
        is_named: bool = False,
    ) -> None:
        self._produce = produce
        self._request_id = request_id
        self._error_event = error_event
        self._is_named = is_named

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
            if self._is_named:
                body = b"event: " + event.__struct_config__.tag.encode() + b"\n" + body
            await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            await self._produce(emit)
        except Exception as error:
            if not started:
                raise
            await emit(self._error_event(error_response(error, self._request_id)))
        if not started:
            await start()
        end = b"" if self._is_named else b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end, "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects before, cancel it and raise `ClientDisconnect`.

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
        # The work's own clean-up, which aborts on the engine, ends before the request counts as answered.
        await asyncio.gather(task, watch, return_exceptions=True)
        # The exception of a failed task refers to this frame, and the frame to the task: a cycle that would keep a body
        # of megabytes until Python's collector runs.
        del task, watch


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
