"""Control routes of low-rank adapters. The names and answers are those of vLLM."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from eagleray.messages.control import LoadAdapter, UnloadAdapter
from eagleray.server.control import ControlMessage, control_endpoint
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.http_responses import unless_disconnected
from eagleray.server.parameters import ControlParameters, ParameterDecoder
from eagleray.server.service import Service

REPLACE_PATHS = ("/load_lora_adapter", "/skyrl/v1/load_lora_adapter")
"""Routes of prime-rl and SkyRL, which load each version of an adapter by the same name."""


class LoadAdapterParameters(ControlParameters, kw_only=True):
    lora_name: Annotated[str, Meta(min_length=1, max_length=512, description="Name that requests give as `model`.")]
    lora_path: Annotated[str, Meta(min_length=1, description="Directory in PEFT's format that every engine can read.")]
    load_inplace: Annotated[
        bool, Meta(description="Replace an adapter of this name. Running requests keep the one that they began with.")
    ] = False
    base_model_name: Annotated[str | None, Meta(description="Without effect.")] = None
    is_3d_lora_weight: Annotated[bool, Meta(description="Only false.")] = False


class ReplaceAdapterParameters(LoadAdapterParameters, kw_only=True):
    load_inplace: Annotated[bool, Meta(description="As in /v1/load_lora_adapter, but true unless given.")] = True


class UnloadAdapterParameters(ControlParameters, kw_only=True):
    lora_name: Annotated[str, Meta(description="Name of the adapter.")]
    lora_int_id: Annotated[int | None, Meta(description="Without effect.")] = None


class LoraRoutes:
    """The handlers that answer by text."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._load = ParameterDecoder(LoadAdapterParameters, service)
        self._unload = ParameterDecoder(UnloadAdapterParameters, service)

    def endpoints(self) -> list[Endpoint]:
        return [
            _text_endpoint(
                "/v1/load_lora_adapter", self.load, LoadAdapterParameters, "Load an adapter on all engines."
            ),
            _text_endpoint("/v1/unload_lora_adapter", self.unload, UnloadAdapterParameters, "Unload an adapter."),
            *(
                control_endpoint(
                    path,
                    self._service,
                    ReplaceAdapterParameters,
                    load_request,
                    "Load an adapter on all engines, in place of one of the same name if there is one.",
                    ControlMessage,
                    answer=lambda result: ControlMessage(status="ok"),
                )
                for path in REPLACE_PATHS
            ),
        ]

    async def load(self, request: Request) -> Response:
        parameters = await self._load.read(request)
        await self._control(request, load_request(parameters), parameters.timeout)
        return PlainTextResponse(f"Success: LoRA adapter '{parameters.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        parameters = await self._unload.read(request)
        await self._control(request, UnloadAdapter(parameters.lora_name), parameters.timeout)
        return PlainTextResponse(f"Success: LoRA adapter '{parameters.lora_name}' removed successfully.")

    async def _control(self, request: Request, call: LoadAdapter | UnloadAdapter, timeout: float | None) -> None:
        operation_id = request.scope["state"]["request_id"]
        work = self._service.client.control(call, timeout=timeout, operation_id=operation_id)
        await unless_disconnected(request.receive, work)


def load_request(given: LoadAdapterParameters) -> LoadAdapter:
    return LoadAdapter(name=given.lora_name, path=given.lora_path, load_inplace=given.load_inplace)


def _text_endpoint(path: str, handler: Any, parameters: type[msgspec.Struct], summary: str) -> Endpoint:
    operation = Operation(
        handler,
        summary,
        request_body=parameters,
        takes_query=True,
        response=str,
        error_statuses=(400, 404, 409, 413, 500, 503, 504),
    )
    return Endpoint(path, is_control=True, post=operation)
