"""/collective_rpc: call a method of the workers or of their extension.

Arguments and results are plain data (`messages.plain`) as JSON, which has neither arrays nor bytes. An array is
`{"data", "shape", "dtype"}`: its bytes in C order as base64, and numpy's name of the dtype, such as "<f4". In both
directions, so an object of exactly these three fields is an array. Bytes become base64, the keys of a dict texts, and
floats that are not finite null; in arguments they have no form. A tensor in a result is an object like that of an
array, with torch's name of the dtype, such as "torch.bfloat16"; a dtype is this name, and a `torch.Size` a list. This
process does not import torch.
"""

from __future__ import annotations

import base64
import json
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from eagleray.errors import InvalidRequest, RequestFailed
from eagleray.messages.arrays import Array
from eagleray.messages.torch_values import CudaTensorHandle, TensorBytes
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.http_responses import json_response, unless_disconnected
from eagleray.server.service import Service
from eagleray.server.skyrl_calls import skyrl_request

ARRAY_FIELDS = {"data", "shape", "dtype"}


class CollectiveRpcRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call. An array is an object of `data` (base64 of its bytes), `shape` and `dtype` ("<f4")."""

    method: Annotated[
        str, Meta(description="A public method of the server's `worker_extension_cls`, or a built-in one.")
    ]
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: Annotated[float, Meta(gt=0, description="Seconds. Default: ten minutes.")] | None = None


class CollectiveRpcResponse(msgspec.Struct, frozen=True):
    results: Annotated[list[Any], Meta(description="The value that each worker returned, in order of rank.")]


class CollectiveRpcRoute:
    """The handler. `is_control`: whether the route needs the rights of a control route.

    The methods of SkyRL's worker extension become control calls only if `is_control`, and if there is no extension that
    may have methods of these names.
    """

    def __init__(self, service: Service, *, is_control: bool, has_extension: bool) -> None:
        self._service = service
        self._is_control = is_control
        self._has_skyrl_calls = is_control and not has_extension
        self._body = service.body_decoder(CollectiveRpcRequest)

    def endpoints(self) -> list[Endpoint]:
        call = Operation(
            self.call,
            "Call a method of the worker extension, or a built-in one, on every worker.",
            request_body=CollectiveRpcRequest,
            response=CollectiveRpcResponse,
            error_statuses=(400, 409, 413, 500, 503, 504),
        )
        return [Endpoint("/collective_rpc", is_control=self._is_control, post=call)]

    async def call(self, request: Request) -> Response:
        body = await self._body.read(request)
        if self._has_skyrl_calls and (steering := skyrl_request(body.method, body.kwargs or {})) is not None:
            operation_id = request.scope["state"]["request_id"]
            answer = self._service.client.control(steering, timeout=body.timeout, operation_id=operation_id)
            return json_response(CollectiveRpcResponse([await unless_disconnected(request.receive, answer)]))
        self._service.check_ready()
        args, kwargs = _arguments(body)
        work = self._service.client.call_workers(body.method, args, kwargs, timeout=body.timeout, as_torch=False)
        results = await unless_disconnected(request.receive, work)
        return json_response(CollectiveRpcResponse(to_json(results)))


def _arguments(body: CollectiveRpcRequest) -> tuple[list[Any], dict[str, Any]]:
    try:
        return from_json(body.args or [], "args"), {
            name: from_json(value, f"kwargs.{name}") for name, value in (body.kwargs or {}).items()
        }
    except RecursionError:
        raise InvalidRequest("`args` or `kwargs` is nested too deeply", param="args") from None


def to_json(value: Any) -> Any:
    """Return plain data as values for a JSON encoder that encodes bytes."""
    match value:
        case list():
            return [to_json(item) for item in value]
        case dict():
            return {_key(key): to_json(item) for key, item in value.items()}
        case np.ndarray():
            return {"data": value.tobytes(), "shape": list(value.shape), "dtype": value.dtype.str}
        case TensorBytes():
            return {"data": value.data, "shape": list(value.shape), "dtype": value.dtype}
        case CudaTensorHandle():
            raise RequestFailed("a result has a handle of CUDA memory, which has no form in JSON: call from Python")
        case _:
            return value


def from_json(value: Any, param: str) -> Any:
    """Return decoded JSON as plain data. `param` is the place of `value`, for the `InvalidRequest` of a wrong array."""
    match value:
        case list():
            return [from_json(item, f"{param}[{index}]") for index, item in enumerate(value)]
        case dict() if value.keys() == ARRAY_FIELDS:
            return _array(value, param)
        case dict():
            return {key: from_json(item, f"{param}.{key}") for key, item in value.items()}
        case _:
            return value


def _key(key: Any) -> str:
    match key:
        case str():
            return key
        case bytes():
            return base64.b64encode(key).decode()
        case _:
            return json.dumps(key)


def _array(fields: dict[str, Any], param: str) -> Array:
    """Return the array, which owns its bytes."""
    try:
        data = base64.b64decode(fields["data"], validate=True)
        return np.frombuffer(data, np.dtype(fields["dtype"])).reshape(fields["shape"]).copy()
    except (TypeError, ValueError, SyntaxError) as error:  # all that numpy and base64 raise for wrong fields
        raise InvalidRequest(
            f"`{param}`: an object of `data`, `shape` and `dtype` is an array, but this is none: {error}", param=param
        ) from None
