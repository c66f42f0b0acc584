"""Routes for operators and load balancers: liveness, readiness, load, version, metrics."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from eagleray.metrics.exposition import CONTENT_TYPE
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.error_responses import ErrorRule, RefusedRequest
from eagleray.server.http_responses import json_response
from eagleray.server.service import Service


class Status(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Version(msgspec.Struct, frozen=True):
    version: str


class Load(msgspec.Struct, frozen=True):
    server_load: int
    """Number of this server's requests that are waiting or running."""


class StatusRoutes:
    """The handlers. None of them waits for an engine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        alive = Operation(self.live, "Does the process answer?", response=Status)
        healthy = Operation(self.health, "Is there an engine?", response=Status, error_statuses=(503,))
        ready = Operation(self.ready, "Could a request be completed now?", response=Status, error_statuses=(503,))
        version = Operation(self.version, "The version of eagleray.", response=Version)
        load = Operation(self.load, "The number of requests in flight.", response=Load)
        metrics = Operation(self.metrics, "Metrics for Prometheus, as text.")
        return [
            Endpoint("/live", is_open=True, get=alive),
            Endpoint("/health", is_open=True, get=healthy),
            Endpoint("/ready", is_open=True, get=ready),
            Endpoint("/ping", is_open=True, get=healthy, post=healthy),
            Endpoint("/version", is_open=True, get=version),
            Endpoint("/load", get=load),
            Endpoint("/metrics", is_open=True, get=metrics),
        ]

    async def live(self, request: Request) -> Response:
        return json_response(Status())

    async def health(self, request: Request) -> Response:
        self._service.check_engine()
        return json_response(Status())

    async def ready(self, request: Request) -> Response:
        self._service.check_ready()
        self._check_serving()
        return json_response(Status())

    def _check_serving(self) -> None:
        """Raise `RefusedRequest`, with the name of the state as its code, while requests have to wait. They run while
        an update is open, unless it overwrites the weights."""
        state = self._service.client.state
        if state.may_step or state.is_held:  # a hold lasts only a moment
            return
        name = "sleeping" if state.asleep else "paused" if state.pause is not None else "updating"
        reason = f"the instance is {name}: requests that come now wait"
        if state.lacks_weights and state.name == "serving":
            name = "weights_missing"
            reason = "weights are missing, see /weight_info: requests that come now wait for a complete update"
        raise RefusedRequest(reason, ErrorRule(503, "server_error", name), {"retry-after": "1"})

    async def version(self, request: Request) -> Response:
        return json_response(Version(self._service.version))

    async def load(self, request: Request) -> Response:
        return json_response(Load(self._service.client.num_in_flight))

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), headers={"content-type": CONTENT_TYPE})
