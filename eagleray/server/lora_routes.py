"""Control routes of low-rank adapters. The names and answers are those of vLLM."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from starlette.responses import PlainTextResponse

from eagleray.errors import InvalidRequest
from eagleray.messages.control import LoadAdapter, UnloadAdapter
from eagleray.server.control import ControlMessage, control_endpoint
from eagleray.server.endpoint import Endpoint
from eagleray.server.http_responses import json_response
from eagleray.server.parameters import ControlParameters
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


def lora_endpoints(service: Service) -> list[Endpoint]:
    """Return the endpoints of adapters. vLLM's own routes answer by text."""
    return [
        control_endpoint(
            "/v1/load_lora_adapter",
            service,
            LoadAdapterParameters,
            _load_request,
            "Load an adapter on all engines.",
            str,
            respond=lambda given, result: PlainTextResponse(
                f"Success: LoRA adapter '{given.lora_name}' added successfully."
            ),
        ),
        control_endpoint(
            "/v1/unload_lora_adapter",
            service,
            UnloadAdapterParameters,
            lambda given: UnloadAdapter(given.lora_name),
            "Unload an adapter.",
            str,
            respond=lambda given, result: PlainTextResponse(
                f"Success: LoRA adapter '{given.lora_name}' removed successfully."
            ),
        ),
        *(
            control_endpoint(
                path,
                service,
                ReplaceAdapterParameters,
                _load_request,
                "Load an adapter on all engines, or replace the adapter of the same name.",
                ControlMessage,
                respond=lambda given, result: json_response(ControlMessage(status="ok")),
            )
            for path in REPLACE_PATHS
        ),
    ]


def _load_request(given: LoadAdapterParameters) -> LoadAdapter:
    if given.is_3d_lora_weight:
        raise InvalidRequest(
            "`is_3d_lora_weight` must be false: adapters of experts are not supported", param="is_3d_lora_weight"
        )
    return LoadAdapter(name=given.lora_name, path=given.lora_path, load_inplace=given.load_inplace)
