"""The endpoints of the API, and the middleware through which every request and every answer passes.

The table of endpoints is the one source for routing, for the API key rule and for /openapi.json. The middleware owns
the rule that every answer carries `X-Request-Id`, the check of keys, the one place where exceptions become answers, and
the count of answers.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagleray.config.sections import Config
from eagleray.errors import InvalidRequest
from eagleray.log import get_logger
from eagleray.metrics.requests import RequestMetrics
from eagleray.server.access_log import AccessLog
from eagleray.server.body import IGNORED_FIELDS
from eagleray.server.cross_origin import CrossOrigin, is_preflight
from eagleray.server.error_responses import WRONG_METHOD, ErrorForm, HttpError, RefusedRequest, error_response
from eagleray.server.field_fates import Fate
from eagleray.server.http_responses import json_response
from eagleray.server.key_check import KeyCheck, comes_from_this_host
from eagleray.server.paths import normalized, route_path

logger = get_logger(__name__)

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
CLIENT_GONE = 499
"""Status that is counted for a request whose client disconnected before it was answered."""


class Operation(NamedTuple):
    """A method of an endpoint: its handler, and its description for OpenAPI."""

    handler: Callable[[Request], Awaitable[ASGIApp]]
    summary: str
    request_body: type | None = None
    """Struct of the JSON body; None: no body."""
    body_rules: Mapping[str, Any] | None = None
    """JSON schema that a body satisfies beside the one of its struct."""
    fates: Mapping[str, Fate] | None = None
    """Treatment of fields that the struct does not have; None: they are refused."""
    takes_query: bool = False
    """Whether the fields of the body may come as query parameters too, and the body may be left out."""
    response: Any = None
    """Type of the JSON answer; None: plain text, or nothing."""
    may_be_accepted: bool = False
    """Whether the status may be 202, of an answer about an operation that goes on."""
    gives_msgpack: bool = False
    """Whether the answer is msgpack for requests that accept it."""
    stream_event: Any = None
    """Type of the events under `"stream": true`; None: does not stream."""
    has_named_events: bool = False
    """Whether each event carries its name, and errors are among the types of events."""
    headers: Mapping[str, Mapping[str, Any]] = {}
    """JSON schemas of the headers that the operation reads, by name."""
    error_statuses: tuple[int, ...] = ()
    """Statuses of errors, without those of every route."""


class Endpoint:
    """A URL pattern and its operations, as an ASGI application. `is_open`: whether it needs no API key. `is_control`:
    whether it needs the rights of a control route, see `KeyCheck`. `is_polled`: whether clients ask for it all the
    time, so that only errors are logged, as for open endpoints. `error_form`: form of errors; None: OpenAI's."""

    def __init__(
        self,
        pattern: str,
        *,
        is_open: bool = False,
        is_control: bool = False,
        is_polled: bool = False,
        error_form: ErrorForm | None = None,
        **operations: Operation,
    ) -> None:
        self.pattern = pattern
        """Pattern for the router, such as `/models/{name:path}`."""
        self.path = re.sub(r"\{(\w+):\w+\}", r"{\1}", pattern)
        """Path for people and OpenAPI, such as `/models/{name}`."""
        self.is_open = is_open
        self.is_control = is_control
        self.is_polled = is_polled
        self.error_form = error_form
        self.operations = {method.upper(): operation for method, operation in operations.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # HEAD is GET without the body, which uvicorn leaves out.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if method not in self.operations:
            allowed = sorted(self.operations)
            raise RefusedRequest(
                f"{self.path} does not take {scope['method']}, but {' and '.join(allowed)}",
                WRONG_METHOD,
                {"allow": ", ".join(allowed)},
            )
        response = await self.operations[method].handler(Request(scope, receive))
        await response(scope, receive, send)


class RequestMiddleware:
    """ASGI middleware around the router of `endpoints`. Handlers find `request_id` and `arrival` in the state."""

    def __init__(
        self,
        router: ASGIApp,
        endpoints: list[Endpoint],
        config: Config,
        metrics: RequestMetrics,
        *,
        has_access_log: bool,
        has_local_clients: bool,
    ) -> None:
        self._router = router
        self.open_paths = frozenset(endpoint.path for endpoint in endpoints if endpoint.is_open)
        """Paths that need no API key, because they show nothing but the server's state."""
        self._control_paths = frozenset(endpoint.path for endpoint in endpoints if endpoint.is_control)
        self._keys = KeyCheck(open_paths=self.open_paths, control_paths=self._control_paths, config=config)
        self._error_forms = {endpoint.path: form for endpoint in endpoints if (form := endpoint.error_form)}
        self._metrics = metrics
        polled = {endpoint.path for endpoint in endpoints if endpoint.is_open or endpoint.is_polled}
        self._access_log = AccessLog(config.serving, polled) if has_access_log else None
        self._has_local_clients = has_local_clients
        self._cross_origin = CrossOrigin(config.serving)
        self._takes_origins = bool(config.serving.allowed_origins)
        self._root_path = config.serving.url_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        answer = ResponseSender(send, state)
        state["arrival"] = time.perf_counter()
        try:
            headers = Headers(scope=scope)
            if self._takes_origins:
                answer.headers = self._cross_origin.answer_headers(scope["headers"])
            state["request_id"] = answer.request_id = _request_id(headers, answer.request_id)
            if scope["method"] == "OPTIONS" and is_preflight(headers):  # browsers send no key with it
                await Response(headers=self._cross_origin.preflight(headers))(scope, receive, answer.send)
                return
            path = self._set_route_path(scope)
            if self._keys.has_keys or path in self._control_paths:
                self._keys.check(path, headers, is_local=self._has_local_clients and comes_from_this_host(scope))
            await self._router(scope, receive, answer.send)
        except ClientDisconnect:
            logger.debug(
                "request %s: the client has disconnected",
                answer.request_id,
                extra={"request_id": answer.request_id},
            )
        except Exception as error:
            refusal = error_response(error, answer.request_id)
            if answer.status:
                raise  # a part of the answer was sent and cannot be corrected: uvicorn closes the connection
            response = self._refusal_response(refusal, self._set_route_path(scope))
            await response(scope, receive, answer.send)
        finally:
            endpoint = scope.get("endpoint")
            route = endpoint.path if isinstance(endpoint, Endpoint) else "unknown"
            method = scope["method"] if scope["method"] in METHODS else "other"
            status = answer.status or CLIENT_GONE
            self._metrics.http_answered(route, method, status)
            if self._access_log is not None:
                seconds = time.perf_counter() - state["arrival"]
                self._access_log.write(scope, route, status, seconds, answer.request_id)

    def _set_route_path(self, scope: Scope) -> str:
        """Set the path so that a slash at its end does not matter. Return the path that the router matches: without
        `root_path`, and without the prefix at which a program has mounted the app."""
        scope["root_path"] = scope.get("root_path") or self._root_path
        path: str = scope["path"]
        if not scope["root_path"] and len(path) > 1 and not path.endswith("/"):
            return path
        scope["path"] = normalized(path, scope["root_path"])
        return route_path(scope["path"], scope["root_path"])

    def _refusal_response(self, refusal: HttpError, path: str) -> Response:
        """Return the answer for an error, in the form of the API that the path belongs to."""
        form = self._error_forms.get(path)
        if form is None:
            return json_response(refusal.reply, refusal.status, refusal.headers)
        status = form.statuses.get(refusal.status, refusal.status)
        return json_response(form.convert(refusal), status, refusal.headers)

    def count_refusal(self, status: int) -> None:
        """Count an answer of the HTTP protocol to a request that did not reach the application."""
        self._metrics.http_answered("unknown", "other", status)


class ResponseSender:
    """Sends the answer to one request with the request's id and the names of ignored fields, and keeps its status.

    `state`: that of the request.
    """

    def __init__(self, send: Send, state: Mapping[str, Any]) -> None:
        self._send = send
        self._state = state
        self.request_id = secrets.token_hex(16)
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers that the answer gets besides its own and its id."""
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            if ignored := self._state.get(IGNORED_FIELDS):
                headers["x-eagleray-ignored"] = ignored
            headers.raw.extend(self.headers)
        await self._send(message)


def _request_id(headers: Headers, made: str) -> str:
    given = headers.get("x-request-id")
    if given is None:
        return made
    if not REQUEST_ID.fullmatch(given):
        raise InvalidRequest("header X-Request-Id must be 1 to 128 visible ASCII characters", param="X-Request-Id")
    return given
