"""The outermost layer of the application: where a request gets its id and leaves as an answer, whatever happened.

Owns the rule that every answer carries `X-Request-Id`, the API key check, the one place where exceptions become
answers, and the count of answers.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagleray.errors import InvalidRequest
from eagleray.log import get_logger
from eagleray.metrics.exposition import Metrics
from eagleray.server.endpoint import Endpoint
from eagleray.server.error_responses import WrongApiKey, error_response
from eagleray.server.http_responses import json_response

logger = get_logger(__name__)

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
CLIENT_GONE = 499
"""What is counted when nobody was left to answer."""


class RequestMiddleware:
    """ASGI middleware around the router of `endpoints`. Handlers find `request_id` and `arrival` in the state."""

    def __init__(self, router: ASGIApp, endpoints: list[Endpoint], api_keys: list[str], metrics: Metrics) -> None:
        self._router = router
        self.open_paths = frozenset(endpoint.path for endpoint in endpoints if endpoint.is_open)
        """Paths that need no API key, because they tell the state of the server alone."""
        self._keys = [key.encode() for key in api_keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        answer = ResponseSender(send)
        state = scope.setdefault("state", {})
        state["arrival"] = time.perf_counter()
        try:
            headers = Headers(scope=scope)
            state["request_id"] = answer.request_id = _request_id(headers, answer.request_id)
            self._check_key(scope["path"], headers)
            await self._router(scope, receive, answer.send)
        except ClientDisconnect:
            logger.debug("request %s: the client went away", answer.request_id)
        except Exception as error:
            refusal = error_response(error, answer.request_id)
            if answer.status:
                raise  # half an answer is out and cannot be mended: the server closes the connection
            await json_response(refusal.reply, refusal.status, refusal.headers)(scope, receive, answer.send)
        finally:
            endpoint = scope.get("endpoint")
            route = endpoint.path if isinstance(endpoint, Endpoint) else "unknown"
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._metrics.http_answered(route, method, answer.status or CLIENT_GONE)

    def count_refusal(self, status: int) -> None:
        """Count an answer of the HTTP protocol, to a request that did not reach the application."""
        self._metrics.http_answered("unknown", "other", status)

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._keys or path in self.open_paths:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Every key is compared, in constant time: the time taken tells nothing about any of them.
        matches = [hmac.compare_digest(key.encode("latin-1"), known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise WrongApiKey("wrong or missing API key; send it as `Authorization: Bearer KEY`")


class ResponseSender:
    """The answer to one request: adds the request's id, and remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.request_id = secrets.token_hex(16)
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)


def _request_id(headers: Headers, made: str) -> str:
    given = headers.get("x-request-id")
    if given is None:
        return made
    if not REQUEST_ID.fullmatch(given):
        raise InvalidRequest("header X-Request-Id must be 1 to 128 visible ASCII characters", param="X-Request-Id")
    return given
