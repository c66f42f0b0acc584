"""One HTTP request and its answer, as uvicorn's class, with the errors and versions that it does not handle.

Made by the protocol of the connection, and owned by it.
"""

from __future__ import annotations

import copy

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from eagleray.errors import EagleRayError


class RequestCycle(RequestResponseCycle):
    """A request and its answer. `error`, if it is set, is raised where the application reads the body."""

    error: EagleRayError | None = None
    closes_later = False
    """Whether the last answer of the connection is complete while the rest of the body is still to come. The protocol
    closes the connection then: a socket that is closed with unread bytes is reset, and the client might never see the
    answer."""

    async def receive(self) -> ASGIReceiveEvent:
        event = await super().receive()
        if self.error is not None:
            raise copy.copy(self.error)  # a copy, because the traceback of `error` would keep the body in memory
        return event

    async def send(self, message: ASGISendEvent) -> None:
        if (
            self.more_body  # first, because it is false for nearly all answers
            and not self.keep_alive
            and message["type"] == "http.response.body"
            and not message.get("more_body", False)
        ):
            self.keep_alive = self.closes_later = True
        await super().send(message)


class RequestCycleOfHttp10(RequestCycle):
    """A request of HTTP/1.0, which knows no chunks: an answer without a length ends with the connection."""

    _has_length = True
    """Whether the answer says its length."""

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", []))
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
