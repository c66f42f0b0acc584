"""Control routes: pauses, sleep, the prefix cache, aborts. The names and answers are those of vLLM.

A client that disconnects does not end its operation; the same call again, with the same X-Request-Id, gets the outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from eagleray.client.control_requests import pause_request, sleep_request, wake_up_request
from eagleray.errors import DeadlineExceeded, EngineFailed, InvalidRequest
from eagleray.messages.control import (
    AbortRequests,
    ControlRequest,
    GetWeightInfo,
    ResetPrefixCache,
    Resume,
)
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.error_responses import ENGINE_UNRESPONSIVE, RefusedRequest
from eagleray.server.http_responses import json_response, unless_disconnected
from eagleray.server.parameters import ControlParameters, ParameterDecoder
from eagleray.server.service import Service

LIVENESS_SECONDS = 30.0
"""Time for every worker to answer the probe, if the request sets none."""

ID_PREFIXES = ("cmpl-", "chatcmpl-")
"""Prefixes that the OpenAI routes add to a request's id in their answers."""

Parameters = TypeVar("Parameters", bound="ControlParameters")


class PauseParameters(ControlParameters, kw_only=True):
    mode: Annotated[
        Literal["abort", "wait", "keep"],
        Meta(description="Running requests end with the tokens so far, are waited for, or continue after the pause."),
    ] = "abort"
    clear_cache: Annotated[bool, Meta(description="Empty the prefix cache; without effect in mode keep.")] = True
    wait_for_inflight_requests: Annotated[bool, Meta(description="An older name of mode wait.")] = False


class SleepParameters(ControlParameters, kw_only=True):
    level: Annotated[
        Literal[0, 1, 2], Meta(description="0: no steps run. 1: the cache is freed. 2: the weights are dropped too.")
    ] = 1
    mode: Literal["abort", "wait", "keep"] = "abort"
    tags: Annotated[list[str], Meta(description="Parts of the level. Default: all.")] | None = None


class WakeUpParameters(ControlParameters, kw_only=True):
    tags: Annotated[list[str], Meta(description="weights, kv_cache or scheduling. Default: all.")] | None = None


class ResetPrefixCacheParameters(ControlParameters, kw_only=True):
    reset_running_requests: bool = False
    reset_external: Annotated[bool, Meta(description="Without effect: there is no external cache.")] = False


class AbortParameters(ControlParameters, kw_only=True):
    request_ids: Annotated[list[str], Meta(description="Ids of requests, as in X-Request-Id.")] | None = None


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True):
    status: str


class PauseResponse(ControlMessage, frozen=True, kw_only=True):
    num_kept: int
    num_aborted: int


class SleepResponse(ControlMessage, frozen=True, kw_only=True):
    level: int
    freed_bytes: int


class WakeUpResponse(ControlMessage, frozen=True, kw_only=True):
    tags: Annotated[list[str], Meta(description="Parts that still sleep.")]


class AbortResponse(ControlMessage, frozen=True, kw_only=True):
    aborted: int


class SuccessResponse(msgspec.Struct, frozen=True):
    success: bool


class IsPausedResponse(msgspec.Struct, frozen=True):
    is_paused: bool


class IsSleepingResponse(msgspec.Struct, frozen=True):
    is_sleeping: bool


class ControlOperationRoute(Generic[Parameters]):
    """A route that has the instance execute a call: `make` turns its parameters into the call, and `respond` these and
    the result into the response."""

    def __init__(
        self,
        service: Service,
        parameters: type[Parameters],
        make: Callable[[Parameters], ControlRequest],
        respond: Callable[[Parameters, dict[str, Any]], Response],
    ) -> None:
        self._service = service
        self._parameters = ParameterDecoder(parameters, service)
        self._make = make
        self._respond = respond

    async def __call__(self, request: Request) -> Response:
        parameters = await self._parameters.read(request)
        work = self._service.client.control(
            self._make(parameters), timeout=parameters.timeout, operation_id=request.scope["state"]["request_id"]
        )
        return self._respond(parameters, await unless_disconnected(request.receive, work))


def control_endpoint(
    path: str,
    service: Service,
    parameters: type[Parameters],
    make: Callable[[Parameters], ControlRequest],
    summary: str,
    response: type,
    *,
    respond: Callable[[Parameters, dict[str, Any]], Response] = lambda parameters, result: json_response(result),
    method: Literal["get", "post"] = "post",
) -> Endpoint:
    """Return the endpoint of a control call. `response`: type of the answer. `respond`: by default the result of the
    call is the answer."""
    operation = Operation(
        ControlOperationRoute(service, parameters, make, respond),
        summary,
        request_body=parameters,
        takes_query=True,
        response=response,
        error_statuses=(400, 404, 409, 413, 500, 503, 504) if method == "post" else (400, 503, 504),
    )
    operations = {method: operation}
    return Endpoint(path, is_control=True, **operations)  # type: ignore[arg-type]  # none is `is_open`


class ControlRoutes:
    """The handlers."""

    def __init__(self, service: Service, *, workers_per_engine: int) -> None:
        self._service = service
        self._workers_per_engine = workers_per_engine
        self._liveness = ParameterDecoder(ControlParameters, service)
        self._world_size = ParameterDecoder(WorldSizeParameters, service)

    def endpoints(self) -> list[Endpoint]:
        service = self._service
        return [
            control_endpoint(
                "/pause",
                service,
                PauseParameters,
                lambda given: pause_request(
                    "wait" if given.wait_for_inflight_requests else given.mode, given.clear_cache
                ),
                "Stop generating.",
                PauseResponse,
            ),
            control_endpoint(
                "/resume", service, ControlParameters, lambda given: Resume(), "End a pause.", ControlMessage
            ),
            control_endpoint(
                "/is_paused",
                service,
                ControlParameters,
                lambda given: GetWeightInfo(),
                "Whether the instance is paused.",
                IsPausedResponse,
                respond=lambda given, info: json_response(IsPausedResponse(info["is_paused"])),
                method="get",
            ),
            control_endpoint(
                "/sleep",
                service,
                SleepParameters,
                lambda given: sleep_request(given.level, given.mode, given.tags),
                "Return memory to the system, and stop generating.",
                SleepResponse,
            ),
            control_endpoint(
                "/wake_up",
                service,
                WakeUpParameters,
                lambda given: wake_up_request(given.tags),
                "End a sleep, or a part of it.",
                WakeUpResponse,
            ),
            control_endpoint(
                "/is_sleeping",
                service,
                ControlParameters,
                lambda given: GetWeightInfo(),
                "Whether a part of the instance sleeps.",
                IsSleepingResponse,
                respond=lambda given, info: json_response(IsSleepingResponse(bool(info["asleep"]))),
                method="get",
            ),
            control_endpoint(
                "/release_kv_cache_memory",
                service,
                ControlParameters,
                lambda given: sleep_request(1, "keep", ["kv_cache"]),
                "Return the memory of the cache. Running requests continue after /wake_up.",
                ControlMessage,
                respond=lambda given, result: json_response(ControlMessage(status="kv_cache_released")),
            ),
            control_endpoint(
                "/reset_prefix_cache",
                service,
                ResetPrefixCacheParameters,
                lambda given: ResetPrefixCache(reset_running_requests=given.reset_running_requests),
                "Empty the prefix cache.",
                SuccessResponse,
            ),
            *(
                control_endpoint(path, service, AbortParameters, make, summary, AbortResponse)
                for path, make, summary in (
                    ("/abort_requests", _abort_named, "Abort requests by their ids."),
                    ("/inference/v1/abort_requests", _abort_named_or_all, "Abort requests by their ids, or all."),
                )
            ),
            *(
                Endpoint(path, is_control=True, post=Operation(_do_nothing, f"Nothing: there is no {name}."))
                for path, name in (("/reset_mm_cache", "cache of images"), ("/reset_encoder_cache", "encoder"))
            ),
            Endpoint(
                "/get_world_size",
                is_control=True,
                get=Operation(
                    self.world_size,
                    "The number of workers.",
                    request_body=WorldSizeParameters,
                    takes_query=True,
                    response=WorldSizeResponse,
                    error_statuses=(400,),
                ),
            ),
            Endpoint("/liveness", is_control=True, get=self._liveness_operation, post=self._liveness_operation),
        ]

    async def world_size(self, request: Request) -> Response:
        parameters = await self._world_size.read(request)
        num_engines = len(self._service.ranks) if parameters.include_dp else 1
        return json_response(WorldSizeResponse(num_engines * self._workers_per_engine))

    @property
    def _liveness_operation(self) -> Operation:
        return Operation(
            self.liveness,
            "Do all workers answer?",
            request_body=ControlParameters,
            takes_query=True,
            response=ControlMessage,
            error_statuses=(400, 503),
        )

    async def liveness(self, request: Request) -> Response:
        parameters = await self._liveness.read(request)
        self._service.check_engine()
        timeout = parameters.timeout or LIVENESS_SECONDS
        work = self._service.client.call_workers("liveness_probe", timeout=timeout)
        try:
            await unless_disconnected(request.receive, work)
        except (DeadlineExceeded, EngineFailed) as error:
            raise RefusedRequest(f"a worker does not answer: {error}", ENGINE_UNRESPONSIVE) from None
        return json_response(ControlMessage(status="ok"))


class WorldSizeParameters(msgspec.Struct):
    include_dp: Annotated[bool, Meta(description="Whether to count the workers of all engines, or of one.")] = True


class WorldSizeResponse(msgspec.Struct, frozen=True):
    world_size: int


def _abort_named(given: AbortParameters) -> ControlRequest:
    if given.request_ids is None:
        raise InvalidRequest("`request_ids` is missing", param="request_ids")
    return _abort_named_or_all(given)


def _abort_named_or_all(given: AbortParameters) -> ControlRequest:
    if given.request_ids is None:
        return AbortRequests()
    ids = [name.removeprefix(prefix) for name in given.request_ids for prefix in ("", *ID_PREFIXES)]
    return AbortRequests(request_ids=list(dict.fromkeys(ids)))


async def _do_nothing(request: Request) -> Response:
    return json_response({})
