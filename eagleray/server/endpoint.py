"""One URL of the API: what it does by method, what it takes and gives. The route table is made of these.

The table is the one source for routing, for the API key rule and for /openapi.json.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from eagleray.server.error_responses import WrongMethod


class Operation(NamedTuple):
    """What a method of a URL does."""

    handler: Callable[[Request], Awaitable[ASGIApp]]
    summary: str
    request_body: type | None = None
    """Struct of the JSON body; None: no body."""
    response: Any = None
    """Type of the JSON answer; None: plain text, or nothing."""
    gives_msgpack: bool = False
    """Also as msgpack, to those who accept it."""
    stream_event: type | None = None
    """Struct of the events under `"stream": true`; None: does not stream."""
    headers: Mapping[str, str] = {}
    """What callers may say in headers: name, description."""
    error_statuses: tuple[int, ...] = ()
    """Statuses of errors, other than those that every route may answer with."""


class Endpoint:
    """A URL pattern and its operations, as an ASGI application. `is_open`: answers without an API key."""

    def __init__(self, pattern: str, *, is_open: bool = False, **operations: Operation) -> None:
        self.pattern = pattern
        """As the router reads it: `/models/{name:path}`."""
        self.path = re.sub(r"\{(\w+):\w+\}", r"{\1}", pattern)
        """As people and OpenAPI read it: `/models/{name}`."""
        self.is_open = is_open
        self.operations = {method.upper(): operation for method, operation in operations.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # HEAD is GET without the body, which the server leaves out.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if method not in self.operations:
            allowed = sorted(self.operations)
            raise WrongMethod(
                f"{self.path} does not take {scope['method']}, but {' and '.join(allowed)}", allowed=allowed
            )
        response = await self.operations[method].handler(Request(scope, receive))
        await response(scope, receive, send)
