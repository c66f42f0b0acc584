"""/collective_rpc: call a method of the worker extension on every worker. Only there if the operator wants it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from eagleray.errors import InvalidRequest
from eagleray.server.body import BodyDecoder
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.http_responses import json_response, unless_disconnected
from eagleray.server.plain_json import from_json, to_json
from eagleray.server.service import Service


class CollectiveRpcRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call. An array is an object of `data` (base64 of its bytes), `shape` and `dtype` ("<f4")."""

    method: Annotated[str, Meta(description="A public method of the server's `worker_extension_cls`.")]
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: Annotated[float, Meta(gt=0, description="Seconds. Default: ten minutes.")] | None = None


class CollectiveRpcResponse(msgspec.Struct, frozen=True):
    results: Annotated[list[Any], Meta(description="What each worker returned, in order of rank.")]


class CollectiveRpcRoute:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._body = BodyDecoder(CollectiveRpcRequest, service.body_limits)

    def endpoints(self) -> list[Endpoint]:
        call = Operation(
            self.call,
            "Call a method of the worker extension on every worker.",
            request_body=CollectiveRpcRequest,
            response=CollectiveRpcResponse,
            error_statuses=(400, 413, 500, 503, 504),
        )
        return [Endpoint("/collective_rpc", post=call)]

    async def call(self, request: Request) -> Response:
        body = await self._body.read(request)
        self._service.check_ready()
        args, kwargs = _arguments(body)
        work = self._service.client.call_workers(body.method, args, kwargs, timeout=body.timeout)
        results = await unless_disconnected(request.receive, work)
        return json_response(CollectiveRpcResponse(to_json(results)))


def _arguments(body: CollectiveRpcRequest) -> tuple[list[Any], dict[str, Any]]:
    try:
        return from_json(body.args or [], "args"), {
            name: from_json(value, f"kwargs.{name}") for name, value in (body.kwargs or {}).items()
        }
    except RecursionError:
        raise InvalidRequest("`args` or `kwargs` is nested too deeply", param="args") from None
