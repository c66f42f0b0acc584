"""Control calls as SGLang answers them: `{"success", "message"}`, also if they fail."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from eagleray.client.client import Client
from eagleray.errors import EagleRayError
from eagleray.messages.control import ControlRequest
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.error_responses import ErrorBody, error_response
from eagleray.server.http_responses import json_response, unless_disconnected
from eagleray.server.parameters import ControlParameters, ParameterDecoder
from eagleray.server.service import Service

Parameters = TypeVar("Parameters", bound=ControlParameters)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    success: bool = True
    message: str


class FailedOutcome(Outcome, frozen=True, kw_only=True):
    """A failure, with `error` as in the answers of other routes."""

    error: ErrorBody


class ControlCaller:
    """Sends the control calls of one HTTP request under its id, so that a repeated request joins them."""

    def __init__(self, client: Client, request_id: str, timeout: float | None) -> None:
        self._client = client
        self._request_id = request_id
        self._timeout = timeout

    async def __call__(self, request: ControlRequest) -> dict[str, Any]:
        """Return the answer. Raises as `Client.control`."""
        return await self._client.control(request, timeout=self._timeout, operation_id=self._request_id)


Execute = Callable[[ControlCaller, Parameters], Coroutine[Any, Any, msgspec.Struct]]


class SGLangControlRoute(Generic[Parameters]):
    """A route whose `execute` makes control calls and returns the body of the answer."""

    def __init__(
        self,
        service: Service,
        parameters: type[Parameters],
        execute: Execute[Parameters],
    ) -> None:
        self._service = service
        self._parameters = ParameterDecoder(parameters, service)
        self._execute = execute

    async def __call__(self, request: Request) -> Response:
        request_id = request.scope["state"]["request_id"]
        try:
            given = await self._parameters.read(request)
            caller = ControlCaller(self._service.client, request_id, given.timeout)
            return json_response(await unless_disconnected(request.receive, self._execute(caller, given)))
        except EagleRayError as error:
            refusal = error_response(error, request_id)
            body = refusal.reply.error
            return json_response(
                FailedOutcome(success=False, message=body.message, error=body), refusal.status, refusal.headers
            )


def sglang_endpoint(
    path: str,
    service: Service,
    parameters: type[Parameters],
    execute: Execute[Parameters],
    summary: str,
    *,
    methods: tuple[Literal["get", "post"], ...] = ("post",),
    response: type = Outcome,
) -> Endpoint:
    """Return the endpoint of a control call."""
    operation = Operation(
        SGLangControlRoute(service, parameters, execute),
        summary,
        request_body=parameters,
        takes_query=True,
        response=response,
        error_statuses=(400, 404, 409, 413, 500, 503, 504),
    )
    return Endpoint(path, is_control=True, **dict.fromkeys(methods, operation))  # type: ignore[arg-type]
