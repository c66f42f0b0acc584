"""/weight_checker: checksums of the weights of every worker, to be compared with those of another time.

The server keeps no checksums: the caller does, and sends them to compare. A key is dpD:ppP:tpT:NAME, with the
ranks of the worker and the checkpoint's name of the tensor. Tensors that are packed together have the same checksum.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from eagleray.errors import InvalidRequest
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.http_responses import json_response, unless_disconnected
from eagleray.server.parameters import ControlParameters, ParameterDecoder
from eagleray.server.service import Service

Checksums = dict[str, str]


class CheckerParameters(ControlParameters, kw_only=True):
    action: Literal["checksum", "compare", "reset"]
    baseline: Annotated[Checksums | None, Meta(description="Checksums of an earlier call, to compare with.")] = None


class CheckerResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    checksums: Checksums | msgspec.UnsetType = msgspec.UNSET
    """SHA-256, in hexadecimal digits."""
    match: bool | msgspec.UnsetType = msgspec.UNSET
    mismatches: Annotated[
        list[str] | msgspec.UnsetType, Meta(description="Keys whose checksums differ, or which only one side has.")
    ] = msgspec.UNSET


class WeightCheckerRoute:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._parameters = ParameterDecoder(CheckerParameters, service)

    def endpoints(self) -> list[Endpoint]:
        check = Operation(
            self.check,
            "Checksums of the weights, or a comparison with earlier ones.",
            request_body=CheckerParameters,
            takes_query=True,
            response=CheckerResponse,
            error_statuses=(400, 413, 500, 503, 504),
        )
        return [Endpoint("/weight_checker", is_control=True, post=check)]

    async def check(self, request: Request) -> Response:
        given = await self._parameters.read(request)
        if given.action == "reset":
            raise InvalidRequest(
                "`reset` is not supported: to lose the weights before an update, call /sleep?level=2 and /wake_up",
                param="action",
            )
        if given.action == "compare" and given.baseline is None:
            raise InvalidRequest("`compare` needs `baseline`, the checksums of an earlier call", param="baseline")
        self._service.check_engine()
        work = self._service.client.call_workers("weight_checksums", timeout=given.timeout)
        of_workers: list[Checksums] = await unless_disconnected(request.receive, work)
        checksums = {key: value for one in of_workers for key, value in one.items()}
        if given.action == "checksum":
            return json_response(CheckerResponse(checksums=checksums))
        baseline = given.baseline or {}
        names = sorted(checksums.keys() | baseline.keys())
        mismatches = [name for name in names if checksums.get(name) != baseline.get(name)]
        return json_response(CheckerResponse(match=not mismatches, mismatches=mismatches))
