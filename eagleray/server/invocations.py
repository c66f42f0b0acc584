"""/ and /invocations: an index of the routes, and one route for several of them.

Hosting services such as SageMaker send every request to /invocations, and what stands in the body says what it asks
for. Holds no state of any request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from eagleray.errors import InvalidRequest
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.http_responses import json_response
from eagleray.server.service import Service


class InvocationBody(msgspec.Struct):
    """A body of one of the routes that this one stands for. The other fields are those of that route."""

    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    token_ids: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET


ROUTES = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "token_ids": "/inference/v1/generate",
    "input": "/v1/embeddings",
}
"""Routes by the field that only their bodies have."""


class InvocationRoute:
    """Passes a body on to the route of `endpoints` that it is for."""

    def __init__(self, service: Service, endpoints: Sequence[Endpoint]) -> None:
        self._body = service.body_decoder(InvocationBody)
        by_path = {
            endpoint.path: endpoint.operations["POST"] for endpoint in endpoints if endpoint.path in ROUTES.values()
        }
        self._operations: Mapping[str, Operation] = {
            field: by_path[path] for field, path in ROUTES.items() if path in by_path
        }

    def endpoints(self) -> list[Endpoint]:
        invoke = Operation(
            self.invoke,
            "Do what the route would do that takes such a body: /v1/chat/completions, /v1/completions, "
            "/inference/v1/generate or /v1/embeddings.",
            request_body=InvocationBody,
            error_statuses=(400, 404, 413, 429, 500, 503, 504),
        )
        return [Endpoint("/invocations", post=invoke)]

    async def invoke(self, request: Request) -> ASGIApp:
        data = await self._body.read_bytes(request)
        body = self._body.decode(data)
        for field, operation in self._operations.items():
            if getattr(body, field) is not UNSET:
                return await operation.handler(_with_body(request, bytes(data)))
        raise InvalidRequest(f"the body needs one of the fields {', '.join(self._operations)}", param="messages")


def _with_body(request: Request, data: bytes) -> Request:
    """Return the request with the body that was read from it, inflated."""
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            return await request.receive()
        is_read = True
        return {"type": "http.request", "body": data, "more_body": False}

    about_body = (b"content-encoding", b"content-length")
    headers = [(name, value) for name, value in request.scope["headers"] if name.lower() not in about_body]
    return Request({**request.scope, "headers": headers}, receive)


class RouteSummary(msgspec.Struct, frozen=True):
    path: str
    methods: list[str]
    summary: str


class RouteIndex(msgspec.Struct, frozen=True):
    name: str
    version: str
    documentation: str
    routes: list[RouteSummary]


def index_endpoint(endpoints: Sequence[Endpoint], version: str, url_prefix: str) -> Endpoint:
    """Return the endpoint of /, which lists `endpoints`."""
    routes = [
        RouteSummary(url_prefix + endpoint.path, sorted(endpoint.operations), operation.summary)
        for endpoint in endpoints
        for operation in list(endpoint.operations.values())[:1]
    ]
    index = RouteIndex("eagleray", version, f"{url_prefix}/openapi.json", routes)

    async def show(request: Request) -> Response:
        return json_response(index)

    return Endpoint("/", is_open=True, get=Operation(show, "The routes.", response=RouteIndex))
