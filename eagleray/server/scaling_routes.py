"""Control routes that change the number of engines and API servers, and restart engines one after another.

/scale, /restart                                       all that the instance can do
/scale_elastic_ep, /is_scaling_elastic_ep              the names of vLLM

An operation goes on without its caller. Its status is that of the instance, so every API server knows it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from eagleray.client.control_requests import MAX_COUNT, naming_scaling_fields, restart_request, scale_request
from eagleray.messages.scaling import GetScaling, RestartEngines, Scale
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.http_responses import json_response, unless_disconnected
from eagleray.server.parameters import ControlParameters, ParameterDecoder
from eagleray.server.service import Service

ACCEPTED = 202
"""Status of an answer about an operation that goes on."""

POST_ERRORS = (400, 404, 409, 413, 500, 503, 504)
GET_ERRORS = (400, 404, 503, 504)

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
OperationId = Annotated[str, Meta(min_length=1, max_length=128)]
Rank = Annotated[int, Meta(ge=0)]
DrainTimeout = Annotated[
    float,
    Meta(ge=0, description="Seconds for which engines that go may finish their requests; then these move to others."),
]


class StatusParameters(ControlParameters, kw_only=True):
    operation_id: Annotated[
        OperationId | None, Meta(description="Default: the operation that runs, or the last one.")
    ] = None


class OperationParameters(ControlParameters, kw_only=True):
    operation_id: Annotated[
        OperationId | None,
        Meta(description="The same id with the same fields is the same operation. Default: X-Request-Id."),
    ] = None


class WaitingParameters(OperationParameters, kw_only=True):
    drain_timeout: DrainTimeout = 0.0
    wait: Annotated[bool, Meta(description="Whether to answer when the operation has ended, or at once.")] = True


class ScaleParameters(WaitingParameters, kw_only=True):
    data_parallel_size: Annotated[Count | None, Meta(description="Number of engines.")] = None
    remove_ranks: Annotated[
        list[Rank],
        Meta(description="Engines that go. By default those of the highest ranks go when the number gets smaller."),
    ] = msgspec.field(default_factory=list)
    api_server_count: Annotated[Count | None, Meta(description="Number of API servers.")] = None


class RestartParameters(WaitingParameters, kw_only=True):
    ranks: Annotated[list[Rank], Meta(description="Engines to restart, one after another. Default: all.")] = (
        msgspec.field(default_factory=list)
    )
    options: Annotated[
        dict[str, Any],
        Meta(description="Options that all engines have from now on, by name; null stands for the default."),
    ] = msgspec.field(default_factory=dict)


class ElasticParameters(OperationParameters, kw_only=True):
    new_data_parallel_size: Annotated[Count, Meta(description="Number of engines.")]
    drain_timeout: DrainTimeout = 120.0


class AutoscaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    data_parallel_size: int
    reason: str
    seconds_ago: float


class AutoscaleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The autoscaler."""

    min: int
    max: int
    reason: Annotated[str, Meta(description="Why the number of engines changes, or why it does not.")]
    last_decision: AutoscaleDecision | None
    last_error: Annotated[str | None, Meta(description="Why the last decision could not be carried out.")]


class ScalingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An operation, and the engines and API servers that run."""

    instance_id: Annotated[str, Meta(description="Id of the instance. A restart of the whole server makes another.")]
    operation_id: str | None
    kind: Annotated[Literal["scale", "restart"] | None, Meta(description="null: there was no operation yet.")]
    phase: Literal["idle", "fetching", "queued", "preparing", "draining", "committing", "completed", "failed"]
    requested_data_parallel_size: int | msgspec.UnsetType | None = msgspec.UNSET
    active_data_parallel_size: int
    participating_ranks: Annotated[list[int], Meta(description="Ranks of the engines that run or are restarted.")]
    requested_api_server_count: int | msgspec.UnsetType | None = msgspec.UNSET
    active_api_server_count: int
    requested_options: Annotated[dict[str, Any] | msgspec.UnsetType, Meta(description="Only of a restart.")] = (
        msgspec.UNSET
    )
    engine_options: Annotated[
        dict[str, Any], Meta(description="Options of all engines that restarts have changed since the start.")
    ]
    safe_to_delete_ranks: Annotated[list[int], Meta(description="Ranks that were removed and whose processes exited.")]
    waiting_for: str | None
    last_error: str | None
    is_retryable: Annotated[bool, Meta(description="Whether the same request could succeed later.")]
    seconds: Annotated[float | None, Meta(description="Time that the operation has taken.")]
    autoscale: Annotated[AutoscaleStatus | msgspec.UnsetType, Meta(description="Only with the option `autoscale`.")] = (
        msgspec.UNSET
    )


class ElasticResponse(ScalingStatus, frozen=True, kw_only=True):
    message: str


class IsScalingResponse(msgspec.Struct, frozen=True):
    is_scaling_elastic_ep: bool


class ScalingRoutes:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._status = ParameterDecoder(StatusParameters, service)
        self._scale = ParameterDecoder(ScaleParameters, service)
        self._restart = ParameterDecoder(RestartParameters, service)
        self._elastic = ParameterDecoder(ElasticParameters, service)
        self._is_scaling = ParameterDecoder(ControlParameters, service)

    def endpoints(self) -> list[Endpoint]:
        status = Operation(
            self.status,
            "The scaling operation that runs, or another one.",
            request_body=StatusParameters,
            takes_query=True,
            response=ScalingStatus,
            error_statuses=GET_ERRORS,
        )
        is_scaling = Operation(
            self.is_scaling,
            "Is the number of engines or API servers being changed?",
            request_body=ControlParameters,
            takes_query=True,
            response=IsScalingResponse,
            error_statuses=GET_ERRORS,
        )
        scale = Operation(
            self.scale,
            "Change the number of engines and API servers.",
            request_body=ScaleParameters,
            takes_query=True,
            response=ScalingStatus,
            may_be_accepted=True,
            error_statuses=POST_ERRORS,
        )
        restart = Operation(
            self.restart,
            "Restart engines, one after another, perhaps with other options.",
            request_body=RestartParameters,
            takes_query=True,
            response=ScalingStatus,
            may_be_accepted=True,
            error_statuses=POST_ERRORS,
        )
        elastic = Operation(
            self.scale_elastic,
            "Change the number of engines.",
            request_body=ElasticParameters,
            takes_query=True,
            response=ElasticResponse,
            may_be_accepted=True,
            error_statuses=POST_ERRORS,
        )
        return [
            Endpoint("/scale", is_control=True, get=status, post=scale),
            Endpoint("/restart", is_control=True, post=restart),
            Endpoint("/scale_elastic_ep", is_control=True, get=status, post=elastic),
            Endpoint("/is_scaling_elastic_ep", is_control=True, get=is_scaling, post=is_scaling),
        ]

    async def status(self, request: Request) -> Response:
        given = await self._status.read(request)
        work = self._service.client.control(GetScaling(operation_id=given.operation_id), timeout=given.timeout)
        return json_response(await unless_disconnected(request.receive, work))

    async def is_scaling(self, request: Request) -> Response:
        given = await self._is_scaling.read(request)
        work = self._service.client.control(GetScaling(), timeout=given.timeout)
        status = await unless_disconnected(request.receive, work)
        return json_response(IsScalingResponse(status["kind"] == "scale" and not _has_ended(status)))

    async def scale(self, request: Request) -> Response:
        given = await self._scale.read(request)
        with naming_scaling_fields():
            scale = scale_request(
                given.data_parallel_size, given.remove_ranks, given.api_server_count, given.drain_timeout
            )
            status = await self._execute(request, given, scale, wait=given.wait)
        return _respond(status, wait=given.wait)

    async def restart(self, request: Request) -> Response:
        given = await self._restart.read(request)
        restart = restart_request(given.ranks, given.drain_timeout, given.options)
        return _respond(await self._execute(request, given, restart, wait=given.wait), wait=given.wait)

    async def scale_elastic(self, request: Request) -> Response:
        given = await self._elastic.read(request)
        with naming_scaling_fields(data_parallel_size="new_data_parallel_size"):
            scale = scale_request(given.new_data_parallel_size, drain_timeout=given.drain_timeout)
            status = await self._execute(request, given, scale)
        return _respond(status | {"message": f"Scaled to {given.new_data_parallel_size} data parallel engines"})

    async def _execute(
        self, request: Request, given: OperationParameters, call: Scale | RestartEngines, *, wait: bool = True
    ) -> dict[str, Any]:
        """Begin an operation, or join the one with its id. Returns its status, at its end if `wait`."""
        operation_id = given.operation_id or request.scope["state"]["request_id"]
        work = self._service.client.control(call, timeout=given.timeout, operation_id=operation_id)
        if wait:
            return await unless_disconnected(request.receive, work)
        operation = asyncio.create_task(work)
        # The supervisor answers in order: a call that it refuses has failed before the status arrives.
        status = asyncio.create_task(
            self._service.client.control(GetScaling(operation_id=operation_id), timeout=given.timeout)
        )
        try:
            await asyncio.wait({operation, status}, return_when=asyncio.FIRST_COMPLETED)
            return operation.result() if operation.done() else status.result()
        finally:
            for task in (operation, status):
                task.cancel()  # the operation itself goes on
                with suppress(asyncio.CancelledError, Exception):
                    await task


def _respond(status: dict[str, Any], *, wait: bool = True) -> Response:
    # A caller that waits at an API server that goes is answered before the end.
    return json_response(status, 200 if wait and _has_ended(status) else ACCEPTED)


def _has_ended(status: dict[str, Any]) -> bool:
    return status["phase"] in ("idle", "completed", "failed")
